"""What a client does with the weights that it receives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from ..client import LocalRound
from ..parts import Part

AfterTraining = Callable[[], None]


class LocalUpdate(Part):
    #: True where each client ends with a model of its own, which is then what gets evaluated
    personal: ClassVar[bool] = False
    #: True where it goes by how far a whole model moves in a round; a schedule that trains parts is then refused
    whole_models: ClassVar[bool] = False

    @abstractmethod
    def receive(self, local: LocalRound) -> AfterTraining | None:
        """Change the client's model by `local.received`, before training.

        May return a function that is called after training, for instance to note how far the model moved.
        """
