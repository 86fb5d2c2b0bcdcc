"""What a client does with the weights that it receives."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ..parts import Part

if TYPE_CHECKING:
    from ..client import LocalRound


class LocalUpdate(Part):
    #: True where each client ends with a model of its own, which is then what gets evaluated
    personal: ClassVar[bool] = False

    @abstractmethod
    def receive(self, local: LocalRound) -> None:
        """Change the client's model by `local.received`, before training."""
