"""The loss that a client minimises on its own images."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..augmentations.base import Augmentation
from ..models.model import Model
from ..parts import Part


@dataclass
class Step:
    """Results of one training step, for regularizers to use. Each tuple has one tensor [n, d] for each view.

    Attributes:
        loss: the objective's loss, a scalar.
        representations: the encoder's outputs.
        projections, predictions: the outputs of the online projector and predictor (empty where there is none).
        views: the views that the step received, normalised float32 [n, C, H, W]; the training loop sets them.
        first_view: index in `views`, from 0, of the view that the tuples begin with; the next ones follow it.
    """

    loss: Tensor
    representations: tuple[Tensor, ...]
    projections: tuple[Tensor, ...] = ()
    predictions: tuple[Tensor, ...] = ()
    views: tuple[Tensor, ...] = ()
    first_view: int = 0

    @property
    def online_views(self) -> tuple[Tensor, ...]:
        """Return the views whose outputs the tuples hold."""
        return self.views[self.first_view : self.first_view + len(self.representations)]


class Objective(Part):
    """Builds the heads around an encoder and computes the loss of a step."""

    #: the aggregator that it needs; a recipe without it is refused
    needs_aggregator: ClassVar[str | None] = None
    #: whether it trains on labels, which public images lack
    needs_labels: ClassVar[bool] = False

    @property
    def fresh_target(self) -> bool:
        """Return whether the target network starts every round as a copy of the online one, not only the first."""
        return bool(getattr(self, "fresh_target_each_round", False))

    @property
    def views(self) -> int:
        """Return how many augmented views of each image a step needs."""
        return 2

    @property
    def online_views(self) -> int:
        """Views whose outputs of the online network a step returns: the length of `Step`'s tuples."""
        return self.views

    def training_augmentation(self, augmentation: Augmentation) -> Augmentation:
        """Return the augmentation for training, given the recipe's, which is made for self-supervised methods."""
        return augmentation

    @abstractmethod
    def build(self, encoder: nn.Module, classes: int) -> Model:
        """Build the model around an encoder, which has `num_features`; `classes` is for supervised objectives."""

    @abstractmethod
    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        """Compute the loss of one batch: views are normalised float32 [n, C, H, W] each, labels int64 [n]."""

    def after_step(self, model: Model) -> None:
        """Move the target network by `target_momentum`, if there is one; called after each optimiser step."""
        if (momentum := getattr(self, "target_momentum", None)) is not None:
            model.update_target(momentum)
