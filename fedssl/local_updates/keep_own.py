"""Keep the client's own weights."""

from typing import ClassVar

from pydantic import Field

from ..client import LocalRound
from .base import LocalUpdate


class KeepOwn(LocalUpdate):
    """Hetero-SSFL, Algorithm 1: W_i(t) starts from W_i(t-1). Only regularizers use what the server sends.

    With `keep_optimizer` rounds are only pauses for evaluation, as in centralised training. A client's stored state
    then grows by the size of the trained weights for sgd with momentum, by twice that for adam and adamw. Other local
    updates take weights from the server, which an optimiser's state does not describe, and have no such option.
    """

    personal: ClassVar[bool] = True

    keep_optimizer: bool = Field(
        False, description="whether momentum and moments last as long as the run, and not only for a round"
    )

    def receive(self, local: LocalRound) -> None:
        """Leave the model as it is."""
