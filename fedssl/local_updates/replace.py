"""Take the server's weights."""

from ..client import LocalRound
from ..errors import UserError
from ..models.model import copy_entries
from .base import LocalUpdate


class Replace(LocalUpdate):
    """McMahan et al. 2017: local training starts from the global weights.

    Only what the server sent is replaced; a target network and layers that do not travel stay as they are.
    """

    def receive(self, local: LocalRound) -> None:
        own = local.client.model.state_dict()
        given = {name: tensor for name, tensor in local.received.tensors.items() if name in own}
        for name, tensor in given.items():
            if own[name].shape != tensor.shape:
                raise UserError(
                    f"client {local.client.index} received {name} of shape {tuple(tensor.shape)}, but its model "
                    f"has shape {tuple(own[name].shape)}; clients that exchange weights need the same architecture"
                )
        copy_entries(own, given)
