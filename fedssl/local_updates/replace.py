"""Take the server's weights."""

from __future__ import annotations

from typing import ClassVar

from ..client import LocalRound
from ..models.model import copy_entries
from .base import LocalUpdate


class Replace(LocalUpdate):
    """McMahan et al. 2017: local training starts from the global weights.

    Only what the server sent is replaced; a target network and layers that do not travel stay as they are.
    """

    replaces_weights: ClassVar[bool] = True

    def receive(self, local: LocalRound) -> None:
        own = local.client.model.state_dict()
        copy_entries(own, {name: tensor for name, tensor in local.received.tensors.items() if name in own})
