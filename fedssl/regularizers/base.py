"""Terms that are added to a client's objective."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from torch import Tensor

from ..client import LocalRound
from ..data.batches import batches_of_epoch, endless_batches
from ..data.stored_images import Images
from ..objectives.base import Step
from ..parts import Part

StepLoss = Callable[[Step], Tensor]


class Regularizer(Part):
    """One term of the local loss. A new one needs to override `start_round` only."""

    #: whether it uses the shared public images; a recipe without public images is refused
    needs_public_images: ClassVar[bool] = False
    #: whether it takes steps of the objective on two views of the public images, which have no labels
    runs_objective: ClassVar[bool] = False
    #: the aggregator whose message it reads; a recipe without it is refused
    needs_aggregator: ClassVar[str | None] = None
    #: whether it reads the global model; a recipe in which no weights are exchanged is refused
    needs_global_model: ClassVar[bool] = False
    #: whether it reads `LocalRound.previous`
    needs_previous_model: ClassVar[bool] = False
    #: whether it compares outputs of two views of each image
    needs_two_views: ClassVar[bool] = False

    @abstractmethod
    def start_round(self, local: LocalRound) -> StepLoss:
        """Prepare one client's round and return the function that computes each step's term, a scalar."""


def endless_views(
    local: LocalRound, images: Images, batch_size: int, purpose: str, count: int = 2
) -> Iterator[tuple[Tensor, ...]]:
    """Yield `count` views of each image of a batch, see `LocalRound.views`, of batches without end in random order."""
    batches_per_epoch = batches_of_epoch(len(images), batch_size)
    for number, rows in enumerate(endless_batches(len(images), batch_size, local.generator(f"{purpose} order"))):
        yield local.views(images[rows], rows, purpose, number // batches_per_epoch, count)
