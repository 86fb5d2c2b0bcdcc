"""Training in float64, so that the order of sums does not matter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedssl.models.model import Model
from fedssl.objectives.base import Step


class Double:
    """An objective whose model gets its views in float64."""

    def __init__(self, objective: Any):
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        return self._objective.step(model, tuple(view.double() for view in views), labels)
