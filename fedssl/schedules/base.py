"""Which layers train and travel in a round."""

from __future__ import annotations

from abc import abstractmethod

from ..models.model import Model
from ..parts import Part


class Schedule(Part):
    @abstractmethod
    def prepare(self, model: Model, round_number: int) -> None:
        """Set the modes and `requires_grad` with which this round trains."""

    @abstractmethod
    def travelling(self, model: Model, round_number: int) -> list[str]:
        """State-dict names of what a weight-exchanging aggregator sends up and down in this round."""
