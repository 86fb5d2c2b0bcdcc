"""Supervised training with labels, the usual task of federated averaging."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..models.model import Model
from .base import Objective, Step


class Supervised(Objective):
    """Cross-entropy of a linear classifier on the encoder, on one augmented view."""

    needs_labels: ClassVar[bool] = True

    @property
    def views(self) -> int:
        return 1

    def build(self, encoder: nn.Module, classes: int) -> Model:
        return Model({"encoder": encoder, "classifier": nn.Linear(encoder.num_features, classes)})  # type: ignore[arg-type]

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations = model.encoder(views[0])
        return Step(F.cross_entropy(model.online["classifier"](representations), labels), (representations,))
