"""Trains and evaluates clients one after another, from their states."""

from __future__ import annotations

from torch import Tensor

from ..client import Client
from ..federation import Federation
from ..messages import Message
from ..models.model import Model
from .rounds import evaluate_after


class ClientTrainer:
    """One client at a time, loaded from its state into the model that the client before has left.

    It keeps nothing of a client: what a client answers does not depend on which clients came before.
    """

    def __init__(self, federation: Federation):
        self._federation = federation
        self._models: dict[str, Model] = {}  # the last client's of each architecture, which the next one reuses

    def train(self, index: int, state: Message, received: Message, number: int) -> tuple[Message, Message]:
        """A client's answer to a round's message, and its state after the round.

        The state must be written or copied before the next call, see `Federation.state_in_place`.

        Raises:
            UserError: see `Federation.client` and `train_locally`.
        """
        client = self._load(index, state)
        reply = self._federation.method.client_round(client, received, number)
        return reply, self._federation.state_in_place(client, number)

    def evaluate(self, index: int, state: Message, number: int) -> tuple[dict[str, float], Tensor]:
        """Measures and spectrum of a client's own model after a round; see `evaluate_after`."""
        return evaluate_after(self._federation, self._load(index, state).model, number)

    def _load(self, index: int, state: Message) -> Client:
        architecture = self._federation.recipe.architecture_of(index)
        client = self._federation.client(index, state, self._models.get(architecture))
        self._models[architecture] = client.model
        return client
