"""What a client minimises alone."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..models.model import Model
from ..parts import Part


@dataclass
class Step:
    """What one training step computed, for regularisers to build on. Entries are one tensor a view, [n, d].

    Attributes:
        loss: the objective's loss, a scalar.
        representations: the encoder's outputs.
        projections: the online projector's outputs (empty where there is none).
        predictions: the online predictor's outputs (empty where there is none).
        views: the views that the step was given, normalised float32 [n, C, H, W]; the training loop fills them in.
        first_view: which of them the first entries are of, from 0; the other entries are of those that follow it.
    """

    loss: Tensor
    representations: tuple[Tensor, ...]
    projections: tuple[Tensor, ...] = ()
    predictions: tuple[Tensor, ...] = ()
    views: tuple[Tensor, ...] = ()
    first_view: int = 0

    @property
    def online_views(self) -> tuple[Tensor, ...]:
        """The views that the entries are of."""
        return self.views[self.first_view : self.first_view + len(self.representations)]


class Objective(Part):
    """Builds the heads around an encoder and computes the loss of a step."""

    #: the aggregator that it cannot do without; a recipe without it is then refused
    needs_aggregator: ClassVar[str | None] = None
    #: whether it trains on labels, which public images have none of
    needs_labels: ClassVar[bool] = False

    @property
    def fresh_target(self) -> bool:
        """Whether a target network starts every round as a copy of the online one, not only a client's first."""
        return False

    @property
    def views(self) -> int:
        """Augmented views of each image that a step needs."""
        return 2

    @property
    def online_views(self) -> int:
        """How many of them a step tells the online network's outputs of: the length of `Step`'s tuples."""
        return self.views

    @abstractmethod
    def build(self, encoder: nn.Module, classes: int) -> Model:
        """The model around an encoder (which has `num_features`). `classes` is for supervised objectives."""

    @abstractmethod
    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        """The loss of one batch. Views: normalised float32 [n, C, H, W] each; labels int64 [n]."""

    def after_step(self, model: Model) -> None:
        """Called after each optimiser step: moves the target network where there is one."""
