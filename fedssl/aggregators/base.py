"""How the server joins what the clients send; each part has its client side and its server side in one file."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ..messages import Message
from ..models.model import Model
from ..parts import Part

if TYPE_CHECKING:
    from ..client import LocalRound


class Aggregator(Part):
    """One kind of thing that travels, and how the server joins it. A method may have several, or none.

    A round runs `broadcast` on the server, `collect` on each client after its training, and `aggregate` on the
    server. State and messages hold named tensors; names of different aggregators must differ.
    """

    #: True where the clients exchange weights, so that all need one architecture
    exchanges_weights: ClassVar[bool] = False
    #: True where the server collects from all clients once before the first round
    opening_round: ClassVar[bool] = False
    #: whether it works on the shared public images; a recipe without such images is then refused
    needs_public_images: ClassVar[bool] = False

    def check(self, clients: int) -> None:
        """Refuse options that do not fit the number of clients (UserError). Called before anything runs."""

    def initial_state(self, model: Model | None) -> Message:
        """The server's state before any round. `model` is the first global model where weights are exchanged."""
        return Message()

    @abstractmethod
    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        """What each of the clients receives; `travelling` are the model's entries that travel in this round."""

    @abstractmethod
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        """What a client sends after its round."""

    @abstractmethod
    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        """The entries of the server's state that change, from the replies by client."""
