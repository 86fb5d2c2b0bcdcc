"""A method: one object that every engine runs, composed of a recipe's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .aggregators.base import Aggregator
from .client import Client, LocalRound
from .data.augmentation import AugmentationOptions
from .local_updates.base import LocalUpdate
from .messages import Message, merge
from .models.model import Model
from .objectives.base import Objective
from .randomness import seeded
from .regularizers.base import Regularizer
from .schedules.base import Schedule
from .training import TrainingOptions, train_locally

METRIC = "metric/"


@dataclass(frozen=True)
class Method:
    """A client step and a server step, and nothing that remembers: state goes in and comes out as messages.

    Attributes:
        objective, regularizers, schedule, aggregators, local_update: the parts.
        training, augmentation, rounds, seed: how long and with which numbers the clients train.
        global_model: the first global model, where weights are exchanged.
    """

    objective: Objective
    regularizers: tuple[Regularizer, ...]
    schedule: Schedule
    aggregators: tuple[Aggregator, ...]
    local_update: LocalUpdate
    training: TrainingOptions
    augmentation: AugmentationOptions
    rounds: int
    seed: int
    global_model: Model | None

    # The server's side

    def initial_state(self) -> Message:
        """The server's state before any round."""
        return merge(a.initial_state(self.global_model) for a in self.aggregators).copy()

    @property
    def opening_round(self) -> bool:
        """Whether the server asks every client once before the first round (`open_client`)."""
        return any(a.opening_round for a in self.aggregators)

    def broadcast(self, server: Message, clients: list[int], round_number: int) -> dict[int, Message]:
        """What each of the clients receives in a round."""
        travelling = self.schedule.travelling(self.global_model, round_number) if self.global_model else []
        sent = [a.broadcast(server, clients, travelling) for a in self.aggregators]
        return {k: merge(messages[k] for messages in sent) for k in clients}

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        """The server's next state from the replies by client."""
        state = Message(dict(server.tensors), dict(server.numbers), dict(server.config))
        for aggregator in self.aggregators:
            changed = aggregator.aggregate(server, replies)
            state.tensors.update(changed.tensors)
            state.numbers.update(changed.numbers)
            state.config.update(changed.config)
        return state

    # A client's side

    def open_client(self, client: Client) -> Message:
        """A client's answer in the opening round: nothing is received and nothing is trained."""
        local = self._local_round(client, Message(), 0)
        opening = [a for a in self.aggregators if a.opening_round]
        return self._reply(local, opening)

    def client_round(self, client: Client, received: Message, round_number: int) -> Message:
        """Receive, train, answer. Changes the client's model and memory."""
        local = self._local_round(client, received, round_number)
        with seeded(self.seed, "client", client.index, "round", round_number):
            first = "rounds_taken" not in client.memory.numbers
            self.local_update.receive(local)
            if first:
                client.model.reset_target()
            client.memory.numbers["rounds_taken"] = client.memory.numbers.get("rounds_taken", 0) + 1
            self.schedule.prepare(client.model, round_number)
            train_locally(local, self.training, self.regularizers, self.rounds)
            return self._reply(local, self.aggregators)

    def _local_round(self, client: Client, received: Message, round_number: int) -> LocalRound:
        return LocalRound(client, received, round_number, self.seed, self.objective, self.augmentation)

    def _reply(self, local: LocalRound, aggregators: tuple[Aggregator, ...] | list[Aggregator]) -> Message:
        travelling = self.schedule.travelling(local.client.model, local.number)
        reply = merge(a.collect(local, travelling) for a in aggregators).copy()
        reply.numbers["samples"] = len(local.client.images)
        for name, value in local.logged().items():
            reply.numbers[METRIC + name] = value
        return reply

    # What is evaluated

    @property
    def personal(self) -> bool:
        """Whether each client ends with a model of its own; otherwise the global model is evaluated."""
        return self.local_update.personal

    def load_global(self, server: Message, build: Callable[[], Model]) -> Model:
        """The global model with the server's weights."""
        model = build()
        model.load_state_dict(server.tensors, strict=False)
        return model
