"""Keep a model of one's own beside the global one, and train both."""

from typing import ClassVar

from ..client import LocalRound
from .base import LocalUpdate
from .replace import Replace


class Personal(LocalUpdate):
    """Ditto's two models (Li et al. 2021, Ditto: Fair and Robust Federated Learning through Personalization, Algorithm
    1), of which the second stays with its client.

    In each round a client trains a copy of the received global model with the objective alone, and sends it: this is
    plain federated averaging. It then trains its own model with the objective and the recipe's regularizers, which say
    how near to the received global model it stays (`distance_to_global`). The own models are evaluated. In its first
    round a client's own model starts as the global one; after that it starts from where it was.

    Both take the same batches and views. A target network of the copy starts each round as a copy of its online
    network. Logs `global_loss`, the objective's loss of the copy; `memory` and `flops` are those of both, all else is
    of the own model.
    """

    personal: ClassVar[bool] = True
    trains_global_copy: ClassVar[bool] = True
    whole_models: ClassVar[bool] = True

    def receive(self, local: LocalRound) -> None:
        """Leave the own model as it is; take the global one in the first round."""
        if "rounds_taken" not in local.client.memory.numbers:
            Replace().receive(local)
