"""What is added to the objective of a client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from ..client import LocalRound
from ..errors import UserError
from ..objectives.base import Objective, Step
from ..parts import Part

StepLoss = Callable[[Step], Tensor]


def require_two_views(part: Part, objective: Objective) -> None:
    """Refuse an objective whose steps do not tell of two views of each image (UserError)."""
    if objective.online_views != 2:
        raise UserError(
            f"{part.name} compares two views of each image, but objective {objective.name} passes "
            f"{objective.online_views} through the online network: use simclr, or byol with symmetric: true"
        )


class Regularizer(Part):
    """One term of the local loss. A new one overrides `start_round`, and that is all.

    What it cannot work with is said by the attributes below, `check_objective` and `check_model`.
    """

    #: whether it works on the shared public images; a recipe without such images is then refused
    needs_public_images: ClassVar[bool] = False
    #: whether it takes steps of the objective on these images, which have no labels
    runs_objective: ClassVar[bool] = False
    #: the aggregator whose message it reads; a recipe without it is then refused
    needs_aggregator: ClassVar[str | None] = None
    #: whether it reads the global model; a recipe in which no weights are exchanged is then refused
    needs_global_model: ClassVar[bool] = False

    #: whether it reads `LocalRound.previous`
    needs_previous_model: ClassVar[bool] = False

    def check_objective(self, objective: Objective) -> None:
        """Refuse an objective whose steps lack what the term works on (UserError). Called before anything runs."""

    @abstractmethod
    def start_round(self, local: LocalRound) -> StepLoss:
        """Prepare one client's round and return the function that gives each step's term (a scalar).

        What the round needs (the server's message, the model, the public images, a generator) is in `local`;
        what it should show in the metrics goes to `local.log(name, value)`.
        """
