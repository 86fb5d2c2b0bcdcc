"""Aggregators join on the server what the clients send; each file has a part's client side and its server side."""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from ..client import LocalRound
from ..messages import Message
from ..models.model import Model
from ..parts import Part

#: a tensor's shape: for each dimension a size, a range of sizes, None for any, or a symbol for a size that all share
Shape = tuple[int | range | str | None, ...]
#: symbolic sizes; an unknown one is resolved by majority over the answers (`Method.sizes` gives the known ones)
PUBLIC_IMAGES = "public images"
PROJECTION = "features of a projection"
#: name of a size that each client has for itself: from 1 up to its number of images
OWN_IMAGES = "images of the client"
#: trains the model of a round on its client's images by the recipe's objective for so many epochs
Train = Callable[[LocalRound, int], None]
#: returns by client the sizes that are lower than the given ones, so that no client has more than its share of the sum
Capped = Callable[[dict[int, float]], dict[int, float]]


def fault_of_unit_rows(reply: Message, name: str) -> str | None:
    """Return why a tensor of an answer does not hold rows of length 1, or shorter; rounding may lengthen them."""
    longest = float(torch.linalg.vector_norm(reply.tensors[name], dim=1).max())
    return f"{name} has a row of length {longest:.3g}, expected at most 1" if longest > 1.1 else None


class Aggregator(Part):
    """One kind of content that travels, and how the server aggregates it. A method may have several, or none.

    A round runs `broadcast` on the server, `collect` on each client after its training, and `aggregate` on the
    server. State and messages have named tensors, and the names of different aggregators must differ.
    """

    #: True where the clients exchange weights, so that all need the same architecture
    exchanges_weights: ClassVar[bool] = False
    #: True where the server collects from all clients once before the first round
    opening_round: ClassVar[bool] = False
    #: True where the server trains on the public images before the first round (`train_on_public_images`)
    trains: ClassVar[bool] = False
    #: whether it uses the shared public images; a recipe without public images is refused
    needs_public_images: ClassVar[bool] = False
    #: whether it uses the global model; a recipe in which no weights are exchanged is refused
    needs_global_model: ClassVar[bool] = False

    def check(self, clients: int) -> None:
        """Raise a UserError for options that do not fit the number of clients; called before anything runs."""

    def disclosure(self, clients: int) -> str | None:
        """Return in a few sentences what the server and the clients can learn of one client; None: it has no text."""
        return None

    def initial_state(self, model: Model | None) -> Message:
        """Return the server's state before any round; `model` is the first global model, if weights are exchanged."""
        return Message()

    def train_on_public_images(self, local: LocalRound, train: Train) -> Message:
        """Return entries for the server's first state; `local` is the server as a client with the public images."""
        return Message()

    def open(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        """Return what each client receives in the opening round, if the part has one."""
        return {k: Message() for k in clients}

    @abstractmethod
    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        """Return what each client receives; `travelling` are the model's entries that travel in this round."""

    @abstractmethod
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        """Return what a client sends after its round; Flower clips and noises it for privacy (engines/flower)."""

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        """Names and shapes of the tensors that a client's `collect` sends; the guard refuses an answer without them.

        They are float32 where the server has no entry of their name. A part that returns None states no names and
        shapes; then the guard checks only the values that are sent.
        """
        return {name: tuple(server.tensors[name].shape) for name in travelling} if self.exchanges_weights else None

    def fault(self, client: int, reply: Message) -> str | None:
        """Return why the values of an answer with the `expected` tensors cannot be right; None where they can."""
        return None

    def limited(self, replies: dict[int, Message], capped: Capped) -> tuple[dict[int, Message], dict[int, str]]:
        """Return the answers with no client's above its share of what they sum to, and by client what was lowered."""
        return replies, {}

    @abstractmethod
    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        """Return the entries of the server's state that change, from at least one answer that the guard let through.

        Entries that no client sends, such as a momentum, are the server's own: only `broadcast` hands them on. A metric
        named `NAME/WHO` is logged for that round; WHO is a client's number or `global`.
        """
