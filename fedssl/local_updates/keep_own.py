"""Keep the client's own weights."""

from __future__ import annotations

from typing import ClassVar

from ..client import LocalRound
from .base import LocalUpdate


class KeepOwn(LocalUpdate):
    """Hetero-SSFL, Algorithm 1: W_i(t) starts from W_i(t-1). Only regularizers use what the server sends."""

    personal: ClassVar[bool] = True

    def receive(self, local: LocalRound) -> None:
        """Leave the model as it is."""
