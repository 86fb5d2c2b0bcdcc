"""Take the server's weights."""

from __future__ import annotations

import torch

from ..client import LocalRound
from ..errors import UserError
from .base import LocalUpdate


class Replace(LocalUpdate):
    """McMahan et al. 2017: local training starts from the global weights.

    Only what the server sent is replaced, so a target network and layers that do not travel stay.
    """

    def receive(self, local: LocalRound) -> None:
        own = local.client.model.state_dict()
        with torch.no_grad():
            for name, tensor in local.received.tensors.items():
                if name not in own:
                    continue
                if own[name].shape != tensor.shape:
                    raise UserError(
                        f"client {local.client.index} received {name} of shape {tuple(tensor.shape)}, its model has "
                        f"{tuple(own[name].shape)}; all clients need one architecture to exchange weights"
                    )
                own[name].copy_(tensor)
