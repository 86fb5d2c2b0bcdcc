"""A frozen encoder that clients' networks learn from."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import UserError
from .models.weights import digest, frozen_encoder
from .parts import Part

if TYPE_CHECKING:
    from typing_extensions import Self


def cosines(outputs: Tensor) -> Tensor:
    """Return the cosine similarities [n, n] between a network's outputs [n, d]."""
    rows = F.normalize(outputs, dim=1)
    return rows @ rows.T


def similarity_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(t_i | s_i) of similarities between the images of a batch, mean over images i, a scalar.

    s_i = softmax over j != i of student_ij / temperature, and t_i the same of `teacher`; both are [n, n]. An image's
    similarity to itself is left out, as it is 1 in every network. Two images or fewer give 0.
    """
    logs = []
    for similarities in (student, teacher):
        n = len(similarities)
        others = similarities.flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1)  # without the diagonal
        logs.append(F.log_softmax(others / temperature, dim=1))
    return F.kl_div(logs[0], logs[1], reduction="batchmean", log_target=True)


class TaughtPart(Part):
    """A part with a frozen teacher, which each process loads for itself: it is in no model and in no message.

    The teacher sees images normalised as the clients' own networks do, also where it is timm's, and computes in
    float32. Costs of a step have its operations, but not the memory of its weights.
    """

    teacher: str = Field(..., description="the encoder to learn from: a folder of fedssl export, or timm:NAME")
    teacher_digest: str | None = Field(
        None, description="SHA-256 of the teacher's weights; a run records it, and is not continued with others"
    )

    def recorded(self, image_shape: tuple[int, ...]) -> Self:
        """Return the part with its teacher's digest, and its width where there is an option for it.

        Raises:
            UserError: the teacher cannot be read, takes no images [C, H, W], or is not the one that is recorded.
        """
        network = _read(self.teacher, self.teacher_digest, image_shape)
        found = {"teacher_digest": digest(network.state_dict()), "teacher_features": network.num_features}
        return self.model_copy(update={key: value for key, value in found.items() if key in type(self).model_fields})

    @torch.no_grad()
    def teacher_outputs(self, images: Tensor) -> Tensor:
        """Return the teacher's outputs [n, e] for normalised images, float32 [n, C, H, W], without gradient."""
        return _loaded(self.teacher, self.teacher_digest, tuple(images.shape[1:]), images.device)(images)


def _read(teacher: str, recorded: str | None, image_shape: tuple[int, ...]) -> Any:
    network = frozen_encoder(teacher, image_shape, "distillation.teacher")
    if recorded not in (None, digest(network.state_dict())):
        raise UserError(
            f"distillation.teacher: {teacher} holds other weights than those recorded in teacher_digest when the run "
            "began: restore the folder, or start a new run"
        )
    return network


@functools.lru_cache(maxsize=2)  # an objective's and a regulariser's; all clients of a process share one
def _loaded(teacher: str, recorded: str | None, image_shape: tuple[int, ...], device: torch.device) -> Any:
    with _disable_current_modes():  # its first step may be counted, and what loading computes is not of the step
        return _read(teacher, recorded, image_shape).to(device)
