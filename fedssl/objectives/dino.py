"""DINO: a student predicts a momentum teacher's distribution over prototypes, also from small views of an image."""

import itertools
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.encoders import take_images_of_any_size
from ..models.model import Model
from ..models.stages import StagedEncoder
from .base import Objective, Step


class Prototypes(nn.Linear):
    """Cosine similarities of inputs [n, d] to learned vectors, [n, prototypes]: a linear layer of unit rows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1))


class DINOModel(Model):
    """A student, its teacher of the same three networks, and a vector.

    Buffers:
        centre: moving mean of the teacher's outputs on the client's own images, [prototypes]; it stays with the client.
    """

    centre: Tensor

    def __init__(self, online: dict[str, nn.Module], prototypes: int):
        super().__init__(online, target_parts=tuple(online))
        self.register_buffer("centre", torch.zeros(prototypes))


def distillation_loss(
    student: Tensor, teacher: Tensor, centre: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Return the mean of -sum_k t_k log s_k over images and pairs of different views, a scalar (Eq. 3).

    t is softmax((teacher - centre) / teacher_temperature), s is softmax(student / student_temperature).

    Args:
        student: outputs [views, n, prototypes], of which the first views are the teacher's.
        teacher: outputs [teacher's views, n, prototypes], without gradient.
        centre: [prototypes].
    """
    targets = F.softmax((teacher - centre) / teacher_temperature, dim=-1)
    predicted = F.log_softmax(student / student_temperature, dim=-1)
    losses = -torch.einsum("tnk,snk->ts", targets, predicted) / student.shape[1]
    return (losses.sum() - losses.diagonal().sum()) / (len(teacher) * (len(student) - 1))


class DINO(Objective):
    """Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers, Eq. 1 to 4 and Algorithm 1.

        `distillation_loss`(student's outputs of all views, teacher's outputs of the first two, centre, temperatures)

    The views after the first two are local: small ones with augmentation `multi_crop`, else as the first two. The head
    is the paper's: three linear layers with GELU between them, then `prototypes`, whose inputs and weights are
    normalised. It has no BatchNorm, which the released code has as an option: without it the outputs of all images
    begin almost equal, and some hundreds of steps pass before they part. Vision transformers interpolate their
    positions for smaller views. Regularizers see the two global views. `projections` are the outputs before the
    prototypes.

    The teacher and the centre stay with the client: the centre is the mean of that teacher's outputs on the client's
    own images. So prototypes that all images of one client choose are discouraged there, also where other clients do
    not choose them.

    Defaults are the released code's, with these deviations. There are 4096 prototypes in place of 65536, as they travel
    in each round. The teacher's momentum and temperature are constant (the paper raises the first from 0.996 to 1, the
    second from 0.04 to 0.07). Gradients are not clipped, and the prototypes train from the first epoch on. Each view
    passes through the networks by itself, as with other objectives; the code joins views of one size.
    """

    online_views: ClassVar[int] = 2

    hidden_features: int = Field(2048, ge=1, description="width of the projector's hidden layers")
    output_features: int = Field(256, ge=1, description="dimension of the projections, before the prototypes")
    batch_norm: bool = Field(
        False, description="whether the projector's hidden layers have BatchNorm; true for runs of a few hundred steps"
    )
    prototypes: int = Field(4096, ge=2, description="K; dimension of the distributions")
    local_views: int = Field(8, ge=0, description="views of each image that the student alone sees")
    student_temperature: float = Field(0.1, gt=0, description="divides the student's outputs")
    teacher_temperature: float = Field(0.04, gt=0, description="divides the teacher's outputs, less the centre")
    target_momentum: float = Field(0.996, ge=0, le=1, description="share of the teacher kept at each step")
    centre_momentum: float = Field(0.9, ge=0, le=1, description="share of the centre kept at each step")

    @property
    def views(self) -> int:
        return 2 + self.local_views

    def build(self, encoder: nn.Module, classes: int) -> Model:
        width: int = encoder.num_features  # type: ignore[assignment]
        take_images_of_any_size(encoder.network if isinstance(encoder, StagedEncoder) else encoder)
        sizes = (width, self.hidden_features, self.hidden_features, self.output_features)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            linear = nn.Linear(inputs, outputs)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            layers += [linear, *([nn.BatchNorm1d(outputs)] if self.batch_norm else []), nn.GELU()]
        online = {
            "encoder": encoder,
            "projector": nn.Sequential(*layers[: -2 if self.batch_norm else -1]),  # ends in a linear layer
            "prototypes": Prototypes(self.output_features, self.prototypes, bias=False),
        }
        return DINOModel(online, self.prototypes)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        assert isinstance(model, DINOModel)
        whole, local = views[:2], views[2:]
        teacher = torch.stack(model.target_of_views(whole))
        representations, projections, outputs = model.outputs_of_views(whole)
        if local:
            outputs += model.outputs_of_views(local)[-1]
        temperatures = (self.student_temperature, self.teacher_temperature)
        loss = distillation_loss(torch.stack(outputs), teacher, model.centre, *temperatures)
        model.centre.lerp_(teacher.flatten(0, 1).mean(dim=0), 1.0 - self.centre_momentum)
        return Step(loss, representations, projections)
