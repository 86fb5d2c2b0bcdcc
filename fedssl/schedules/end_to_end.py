"""All layers train in every round."""

from __future__ import annotations

from ..models.model import Model
from .base import Schedule


class EndToEnd(Schedule):
    """The whole online network trains and travels; the target network stays where it is."""

    def prepare(self, model: Model, round_number: int) -> None:
        model.train()
        model.online.requires_grad_(True)

    def travelling(self, model: Model, round_number: int) -> list[str]:
        return [name for name in model.state_dict() if name.startswith("online.")]
