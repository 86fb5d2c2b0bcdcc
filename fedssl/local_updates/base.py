"""Local updates say how a client uses the weights that it receives."""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from ..client import LocalRound
from ..parts import Part

AfterTraining = Callable[[], None]


class LocalUpdate(Part):
    """Changes a client's model by the server's message before training. A new one overrides `receive`."""

    #: True where each client ends with its own model; these models are then evaluated
    personal: ClassVar[bool] = False
    #: True where a client also trains a copy of the received global model, and sends that in place of its own
    trains_global_copy: ClassVar[bool] = False
    #: True where it works with whole models; a schedule that trains parts of a model is refused
    whole_models: ClassVar[bool] = False

    @property
    def keeps_optimizer(self) -> bool:
        """Return whether a client's optimiser goes on from round to round; only if the client's weights do too."""
        return bool(getattr(self, "keep_optimizer", False))

    @abstractmethod
    def receive(self, local: LocalRound) -> AfterTraining | None:
        """Change the client's model by `local.received`; the function that it returns is called after training."""
