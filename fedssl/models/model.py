"""A client's model: the online network that is trained, and the target network where there is one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .view_threads import ViewThreads, view_threads

Layer = Literal["encoder", "predictor"]
#: the online module that a supervised objective trains on the labels; evaluation measures its accuracy
CLASSIFIER = "classifier"


@torch.no_grad()
def copy_entries(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model's `state_dict()`; `load_state_dict` takes several times as long for a small model."""
    if given:
        torch._foreach_copy_([own[name] for name in given], list(given.values()))


def frozen_copy(model: Model, state: dict[str, Tensor]) -> nn.Sequential:
    """Return encoder and projector with the entries of `state`, without gradients, in evaluation mode."""
    other = copy.deepcopy(model)
    other.load_state_dict(state, strict=False)
    return nn.Sequential(other.encoder, other.online["projector"]).requires_grad_(False).eval()


class Model(nn.Module):
    """An online network, which is trained and can travel, and a target network, which stays with its client.

    The online modules are given by name, in the order in which they are applied; the first is `encoder`, and
    `projector` and `predictor` follow where the objective has them. `target_parts` names those that also exist as a
    target network: an exact copy at the start, without gradients.
    """

    def __init__(self, online: dict[str, nn.Module], target_parts: tuple[str, ...] = ()):
        super().__init__()
        self.online = nn.ModuleDict(online)
        self.target = nn.ModuleDict({name: copy.deepcopy(online[name]) for name in target_parts})
        self.target.requires_grad_(False)
        #: state-dict names of what never trains or travels: `model.train` leaves it as the weights to start from
        self.frozen: frozenset[str] = frozenset()
        #: in which contrastive losses take their rows, if not as they are; training.precision
        self.rows_dtype: torch.dtype | None = None
        #: by which two views pass through a network at a time, while the model trains
        self.view_threads: ViewThreads | None = None

    @property
    def encoder(self) -> nn.Module:
        return self.online["encoder"]

    def let_train(self) -> None:
        """Let the online network's parameters have gradients, but for what is frozen."""
        for name, parameter in self.online.named_parameters(prefix="online"):
            parameter.requires_grad_(name not in self.frozen)

    def online_state(self) -> dict[str, Tensor]:
        """Return a copy of the online network's entries, by their names in the whole model's state."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items() if name.startswith("online.")}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def represent(self, images: Tensor, layer: Layer = "predictor") -> Tensor:
        """Return the output [n, d] at a layer for normalised images, float32 [n, C, H, W].

        The layer is `encoder`, or `predictor` for the whole online network.
        """
        return self.encoder(images) if layer == "encoder" else _outputs(self.online, images)[-1]

    def outputs_of_views(self, views: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
        """Return each online network's outputs, in the order of application; each tuple has one per view.

        Views are normalised, float32 [n, C, H, W]; outputs, such as representations and projections, are [n, d] each.
        """
        return tuple(zip(*self._passes(self.online, views), strict=True))

    def unit_rows(self, outputs: Tensor) -> Tensor:
        """Return outputs [n, d] as rows of length 1, in the dtype that contrastive losses take in this training."""
        rows = F.normalize(outputs, dim=1)
        return rows if self.rows_dtype is None else rows.to(self.rows_dtype)

    def target_of_views(self, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the target network's output [n, d] of each of some normalised views, without gradient."""
        with torch.no_grad():
            return tuple(outputs[-1] for outputs in self._passes(self.target, views))

    @contextmanager
    def views_at_a_time(self) -> Iterator[ViewThreads | None]:
        """Let two views pass through a network at the same time in the body if possible (view_threads.py)."""
        with view_threads(self.online, self.target) as self.view_threads:
            try:
                yield self.view_threads
            finally:
                self.view_threads = None

    def _passes(self, chain: nn.ModuleDict, views: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        if self.view_threads is not None and len(views) == 2 and not any(view.requires_grad for view in views):
            return self.view_threads.passes(chain, views, _outputs)
        return [_outputs(chain, view) for view in views]

    def reset_target(self) -> None:
        """Make the target network an exact copy of the online one."""
        for name, module in self.target.items():
            copy_entries(module.state_dict(), self.online[name].state_dict())

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        """Set target = momentum * target + (1 - momentum) * online, on parameters.

        Buffers do not change, as the target's BatchNorm keeps the statistics of its own forward passes, nor do
        parameters whose online counterparts do not train.
        """
        pairs = [
            (old, new)
            for name, module in self.target.items()
            for old, new in zip(module.parameters(), self.online[name].parameters(), strict=True)
            if new.requires_grad
        ]
        if pairs:
            torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], 1.0 - momentum)


def _outputs(chain: nn.ModuleDict, images: Tensor) -> tuple[Tensor, ...]:
    """Return the output of each of several networks that are applied one after another."""
    outputs = [images]
    for network in chain.values():
        outputs.append(network(outputs[-1]))
    return tuple(outputs[1:])


@contextmanager
def untouched_running_statistics(network: nn.Module) -> Iterator[None]:
    """Normalise by the batch's statistics in training mode and change no running ones, in the body.

    They shall tell of a client's own images alone, whatever else passes through its network.
    """
    changed = [m for m in network.modules() if m.training and getattr(m, "track_running_stats", False)]
    for module in changed:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in changed:
            module.track_running_stats = True  # type: ignore[assignment]


def mlp_head(
    in_features: int,
    hidden_features: int,
    out_features: int,
    layers: int = 2,
    batch_norm: bool = True,
    last_batch_norm: bool = False,
) -> nn.Sequential:
    """Build Linear - BatchNorm - ReLU, `layers - 1` times, and then a linear layer.

    A linear layer before a BatchNorm has no bias, as the normalisation would remove it. With two layers this is BYOL's
    projector and predictor and SimSiam's predictor; with three and `last_batch_norm` it is SimSiam's projector. The
    last BatchNorm has no weight and bias, as in the released code of SimSiam and MoCo v3. Initialised from torch's
    global random generator.
    """
    modules: list[nn.Module] = []
    width = in_features
    for _ in range(layers - 1):
        modules.append(nn.Linear(width, hidden_features, bias=not batch_norm))
        if batch_norm:
            modules.append(nn.BatchNorm1d(hidden_features))
        modules.append(nn.ReLU(inplace=True))
        width = hidden_features
    modules.append(nn.Linear(width, out_features, bias=not last_batch_norm))
    if last_batch_norm:
        modules.append(nn.BatchNorm1d(out_features, affine=False))
    return nn.Sequential(*modules)


def with_projector(encoder: nn.Module, hidden_features: int, out_features: int, layers: int) -> Model:
    """Return the model of an encoder and a projector alone, an `mlp_head`."""
    width: int = encoder.num_features  # type: ignore[assignment]
    return Model({"encoder": encoder, "projector": mlp_head(width, hidden_features, out_features, layers)})
