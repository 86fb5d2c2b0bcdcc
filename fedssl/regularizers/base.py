"""What is added to the objective of a client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..objectives.base import Step
from ..parts import Part

if TYPE_CHECKING:
    from ..client import LocalRound

StepLoss = Callable[[Step], Tensor]


class Regularizer(Part):
    """One term of the local loss. A new one overrides `start_round`, and that is all."""

    #: whether it works on the shared public images; a recipe without such images is then refused
    needs_public_images: ClassVar[bool] = False
    #: the aggregator whose message it reads; a recipe without it is then refused
    needs_aggregator: ClassVar[str | None] = None

    #: whether it reads `LocalRound.previous`
    needs_previous_model: ClassVar[bool] = False

    @abstractmethod
    def start_round(self, local: LocalRound) -> StepLoss:
        """Prepare one client's round and return the function that gives each step's term (a scalar).

        What the round needs (the server's message, the model, the public images, a generator) is in `local`;
        what it should show in the metrics goes to `local.log(name, value)`.
        """
