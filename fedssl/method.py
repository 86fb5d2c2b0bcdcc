"""A method: one object that every engine runs, composed of a recipe's parts."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from .accounting import StepCost
from .aggregators.base import PROJECTION, PUBLIC_IMAGES, Aggregator, Shape
from .aggregators.weighted_mean import WeightedMean
from .augmentations.base import Augmentation
from .client import Client, LocalRound
from .errors import memory_sentence
from .guard import CAPPED, REFUSED, Asked, GuardOptions, capped_images, refusals, require_answers
from .local_updates.base import LocalUpdate
from .local_updates.replace import Replace
from .messages import Message, Transport, from_transport, merge, to_transport
from .models.model import Model
from .models.stages import StagedEncoder
from .objectives.base import Objective
from .outliers import change_of_mean, joined_statistics, shortened, weight_changes
from .randomness import deterministic_on, seeded
from .regularizers.base import Regularizer
from .schedules.base import Plan, Schedule
from .training import TrainingOptions, learning_rate, train_before_rounds, train_locally

#: in the server's state where the schedule cuts the encoder: the last round, and by client its number of final layers
ROUND = "schedule/round"
HELD = "schedule/held/"


@dataclass(frozen=True)
class Method:
    """A client step and a server step. A method remembers nothing: state goes in and out as messages.

    Attributes:
        global_model: the first one, where weights are exchanged.
        public_images: uint8 [L, C, H, W]; for aggregators that train on them before the first round.
    """

    objective: Objective
    regularizers: tuple[Regularizer, ...]
    schedule: Schedule
    aggregators: tuple[Aggregator, ...]
    local_update: LocalUpdate
    training: TrainingOptions
    augmentation: Augmentation
    rounds: int
    seed: int
    global_model: Model | None
    guard: GuardOptions
    public_images: Tensor | None = None
    transport: Transport = "float32"

    #: whether clients add noise to what they send, which may make a variance negative
    answers_are_noisy: ClassVar[bool] = False

    # The server's side

    def initial_state(self) -> Message:
        """Return the server's state before any round."""

        def train(local: LocalRound, epochs: int) -> None:
            with deterministic_on(local.client.model.device, self.training.deterministic):
                train_before_rounds(local, self.training, epochs)

        states = [a.initial_state(self.global_model) for a in self.aggregators]
        with seeded(self.seed, "server", "public images"):
            trained = [a.train_on_public_images(self._server_round(), train) for a in self.aggregators if a.trains]
        return merge([*states, *trained]).copy()

    def with_short_server_training(self) -> Method:
        """Return the method with one epoch of the server's own training, for what counts or times clients' steps."""
        short = tuple(a.model_copy(update={"epochs": 1}) if a.trains else a for a in self.aggregators)
        return replace(self, aggregators=short)

    def _server_round(self) -> LocalRound:
        """Return the server as a client numbered -1 that holds the public images and the first global model."""
        assert self.global_model is not None
        assert self.public_images is not None
        no_labels = torch.zeros(len(self.public_images), dtype=torch.int64)
        model = copy.deepcopy(self.global_model)
        return self._local_round(Client(-1, self.public_images, no_labels, None, model), Message(), 0)

    @property
    def opening_round(self) -> bool:
        """Return whether the server asks every client once before the first round (`client_round` 0)."""
        return any(a.opening_round for a in self.aggregators)

    def broadcast_opening(self, server: Message, clients: list[int]) -> dict[int, Message]:
        """Return what each client receives in the opening round; nothing in most methods."""
        sent = [a.open(server, clients, self._travelling(0)) for a in self.aggregators if a.opening_round]
        return to_transport({k: merge(messages[k] for messages in sent) for k in clients}, self.transport)

    def broadcast(self, server: Message, clients: list[int], round_number: int) -> dict[int, Message]:
        """Return what each client receives in a round."""
        return to_transport(self._messages(server, clients, round_number), self.transport)

    def _messages(self, server: Message, clients: list[int], round_number: int) -> dict[int, Message]:
        travelling = self._travelling(round_number)
        sent = [a.broadcast(server, clients, travelling) for a in self.aggregators]
        sent.append({k: self._lacking(server, k, round_number) for k in clients})
        return {k: merge(messages[k] for messages in sent) for k in clients}

    def _lacking(self, server: Message, client: int, round_number: int) -> Message:
        """Return the final layers of the schedule that a client does not have yet."""
        if not (self.schedule.cuts and self.global_model):
            return Message()
        held, done = int(server.numbers.get(f"{HELD}{client}", 0)), self.plan(self.global_model, round_number).done
        encoder = self.global_model.encoder
        assert isinstance(encoder, StagedEncoder)
        names = [f"online.encoder.{name}" for name in encoder.names(range(held, done))]
        return Message({name: server.tensors[name] for name in names})

    def aggregate(
        self,
        server: Message,
        replies: dict[int, Message],
        round_number: int,
        samples: Mapping[int, int] | None = None,
        kept: Callable[[Message], Message] = lambda reply: reply,
    ) -> Message:
        """Return the server's next state from the replies by client; round 0 is the opening round.

        Without any reply, for instance if all sampled clients dropped out, nothing changes. The state's metrics are
        what the aggregators log of the round, and its config's `refused/CLIENT` says why a broken reply was left out
        (guard.py), `capped/CLIENT` why one counts by less than it says. Where `samples` gives a client's number of
        images, its reply may say up to twice as many. `kept` returns a reply in float32 as it is kept until it is
        aggregated, for instance on the disk. A reply is left out too if the state with it fails, or the next round's
        messages made of that state: no state that ends the run is returned.

        Raises:
            UserError: too few replies are left.
        """
        if self.transport != "float32":
            replies = {k: kept(from_transport(reply, self.transport)) for k, reply in replies.items()}
        working = [a for a in self.aggregators if round_number or a.opening_round]
        stated = dict(samples or {})
        refused = self._refusals(server, replies, working, round_number, stated)
        accepted = {k: reply for k, reply in replies.items() if k not in refused}
        if replies:
            require_answers(refused, len(replies), round_number, self.guard)
        elif round_number:  # all who were asked have dropped out: nothing changes
            working = []
        try:
            state = self._next_state(server, accepted, working, round_number, stated)
        except Exception as error:
            if memory_sentence(error):  # no client's fault
                raise
            for k in accepted:
                left = {other: reply for other, reply in accepted.items() if other != k}
                with suppress(Exception):
                    state = self._next_state(server, left, working if left else [], round_number, stated)
                    break
            else:
                raise
            refused = dict(sorted({**refused, k: f"the server cannot go on with it: {error!r}"[:500]}.items()))
            require_answers(refused, len(replies), round_number, self.guard)
        state.config.update({f"{REFUSED}{k}": reason for k, reason in refused.items()})
        return state

    def _next_state(
        self,
        server: Message,
        replies: dict[int, Message],
        working: list[Aggregator],
        round_number: int,
        stated: Mapping[int, int],
    ) -> Message:
        """Return the state from these replies; raise an exception where the next round's messages cannot be made."""
        change = change_of_mean(server, replies, self._rate(round_number))
        replies, capped = self._capped(server, replies, stated)
        config = {name: value for name, value in server.config.items() if not name.startswith((REFUSED, CAPPED))}
        state = Message(dict(server.tensors), dict(server.numbers), config)
        for aggregator in working:
            changed = aggregator.aggregate(server, replies)
            state.tensors.update(changed.tensors)
            state.numbers.update(changed.numbers)
            state.config.update(changed.config)
            state.metrics.update(changed.metrics)
        state.config.update({f"{CAPPED}{k}": reason for k, reason in capped.items()})
        state.numbers.update(self.note_answers(replies, round_number) | change)
        messages = self._messages(state, sorted(replies), min(round_number + 1, self.rounds))
        sent = {id(tensor): (name, tensor) for message in messages.values() for name, tensor in message.tensors.items()}
        for name, tensor in sent.values():
            if not tensor.isfinite().all():
                raise ValueError(f"{name}, which all clients get, would hold NaN or an infinity")
        return state

    def _capped(
        self, server: Message, replies: dict[int, Message], stated: Mapping[int, int]
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """Return the replies with the images that they count by, and what is said of those that count by less."""
        images = {**stated, **{k: reply.numbers["samples"] for k, reply in replies.items()}}
        capped = capped_images(images, self.guard.largest_share)
        counted = {k: capped.get(k, images[k]) for k in replies}
        # with differential privacy what one client sends may not change how another's counts
        bounded = self.guard.largest_influence != 1 and not self.answers_are_noisy
        replies, shorter = shortened(server, replies, counted) if bounded else (replies, {})
        reasons: defaultdict[int, list[str]] = defaultdict(list, {k: [why] for k, why in shorter.items()})
        total, changes = sum(images.values()), weight_changes(server, replies) if bounded else {}
        for k in capped.keys() & replies.keys():
            share = f"{100 * images[k] / total:.4g} % of all, more than guard.largest_share allows"
            reasons[k].append(f"it states {images[k]:g} images, {share}: it counts by {capped[k]:g}")
        influence = {k: counted[k] * change for k, change in changes.items()}
        for k, most in capped_images(influence, self.guard.largest_influence or 1.0).items():
            share = f"{100 * influence[k] / sum(influence.values()):.4g} % of the round's change of the weights"
            counted[k] = most / changes[k]
            limit = f"more than guard.largest_influence allows: it counts by {counted[k]:.4g} images"
            reasons[k].append(f"it has {share}, {limit}")
        changed = {k: replace(replies[k], numbers=replies[k].numbers | {"samples": counted[k]}) for k in reasons}
        replies = replies | changed
        capped_sizes = partial(capped_images, share=self.guard.largest_influence or 1.0)
        limits = [partial(a.limited, capped=capped_sizes) for a in self.aggregators]
        if not self.answers_are_noisy:
            limits.append(partial(joined_statistics, everyone=bounded))
        for limited in limits:
            replies, lowered = limited(replies)
            for k, why in lowered.items():
                reasons[k].append(why)
        return replies, {k: "; ".join(reasons[k]) for k in sorted(reasons)}

    def note_answers(self, answered: Iterable[int], round_number: int) -> dict[str, float]:
        """Return the numbers of the server's state that say which final layers the answering clients hold."""
        if not (self.schedule.cuts and self.global_model and round_number):
            return {}
        done = self.plan(self.global_model, round_number).done
        return {ROUND: float(round_number)} | {f"{HELD}{k}": float(done) for k in answered}

    def _refusals(
        self,
        server: Message,
        replies: dict[int, Message],
        working: list[Aggregator],
        round_number: int,
        samples: Mapping[int, int],
    ) -> dict[int, str]:
        travelling = self._travelling(round_number)
        expected: dict[int, dict[str, Shape]] = {}
        complete = True
        for k in replies:
            parts = [a.expected(server, k, travelling) for a in working]
            expected[k] = {name: shape for part in parts if part is not None for name, shape in part.items()}
            complete = complete and None not in parts
        noisy, share = self.answers_are_noisy, self.guard.largest_share
        asked = Asked(expected, complete, self.sizes, samples, noisy, share, self._rate(round_number))
        refused = refusals(server, replies, asked)
        for k in replies.keys() - refused.keys():
            if fault := next(filter(None, (a.fault(k, replies[k]) for a in working)), None):
                refused[k] = fault
        return dict(sorted(refused.items()))

    @property
    def sizes(self) -> dict[str, int]:
        """Return the named sizes of aggregators' `expected` shapes, as far as the server knows them."""
        images = {} if self.public_images is None else {PUBLIC_IMAGES: len(self.public_images)}
        features = getattr(self.objective, "output_features", None)
        return images if features is None else images | {PROJECTION: features}

    def _rate(self, round_number: int) -> float:
        return learning_rate(self.training, max(round_number, 1), self.rounds, done=0.5)

    def _travelling(self, round_number: int) -> list[str]:
        model = self.global_model
        return self.schedule.travelling(model, self.plan(model, round_number)) if model else []

    def plan(self, model: Model, round_number: int) -> Plan:
        """Return what a round does with the layers of a model; the opening round is planned as the first."""
        layers = model.encoder.layers if isinstance(model.encoder, StagedEncoder) else 1
        return self.schedule.plan(layers, max(round_number, 1), self.seed)

    # A client's side

    def client_round(self, client: Client, received: Message, round_number: int) -> Message:
        """Receive, train, answer; nothing is trained in the opening round, 0. Changes the client's model and memory."""
        with deterministic_on(client.model.device, self.training.deterministic):
            if round_number:
                return self.counted_round(client, received, round_number)[0]
            local = self._local_round(client, received, 0)
            if local.received.tensors:
                self.local_update.receive(local)
                client.model.reset_target()
            return self._reply(local, [a for a in self.aggregators if a.opening_round])

    def counted_round(
        self, client: Client, received: Message, round_number: int, most_steps: int | None = None
    ) -> tuple[Message, StepCost]:
        """Run `client_round` from round 1 on; return also the first step's cost. Stop after `most_steps`."""
        local = self._local_round(client, received, round_number)
        with seeded(self.seed, "client", client.index, "round", round_number):
            if any(r.needs_previous_model for r in self.regularizers):
                local.previous = client.model.online_state()
            first = "rounds_taken" not in client.memory.numbers
            after_training = self.local_update.receive(local)
            receives_target = any(name.startswith("target.") for name in received.tensors)
            starts_anew = self.objective.fresh_target or (first and not receives_target)
            if starts_anew or self.schedule.cuts:
                client.model.reset_target()
            client.memory.numbers["rounds_taken"] = client.memory.numbers.get("rounds_taken", 0) + 1
            global_copy = self._train_global_copy(local, most_steps)
            self.schedule.prepare(client.model, self.plan(client.model, round_number))
            cost = self._train_client(local, most_steps)
            if after_training:
                after_training()
            if global_copy is None:
                return self._reply(local, self.aggregators), cost
            return self._reply_with_global_copy(local, cost, *global_copy)

    def _train_global_copy(self, local: LocalRound, most_steps: int | None) -> tuple[LocalRound, StepCost] | None:
        """Train a copy of the received global model without regularizers, if the local update wants one."""
        if not (self.local_update.trains_global_copy and self.schedule.trains):
            return None
        own = local.client
        client = replace(own, model=copy.deepcopy(own.model), memory=own.memory.copy())
        copied_round = self._local_round(client, local.received, local.number)
        Replace().receive(copied_round)
        client.model.reset_target()
        self.schedule.prepare(client.model, self.plan(client.model, local.number))
        return copied_round, train_locally(copied_round, self.training, [], self.rounds, most_steps)

    def _reply_with_global_copy(
        self, own: LocalRound, own_cost: StepCost, copied_round: LocalRound, copy_cost: StepCost
    ) -> tuple[Message, StepCost]:
        """Return the trained copy as the answer, with the own model's metrics and the cost of both in memory.

        Aggregators look at the own model too, for what they log and keep of it.
        """
        parameters, flops = own_cost.parameters + copy_cost.parameters, own_cost.flops + copy_cost.flops
        cost = replace(own_cost, parameters=parameters, flops=flops)
        reply, metrics = self._reply(copied_round, self.aggregators), self._reply(own, self.aggregators).metrics
        both = {"memory": float(cost.memory), "flops": metrics["flops"] + reply.metrics["flops"]}
        reply.metrics = metrics | both | {"global_loss": reply.metrics["loss"]}
        return reply, cost

    def _train_client(self, local: LocalRound, most_steps: int | None) -> StepCost:
        if self.schedule.trains:
            keep_optimizer = self.local_update.keeps_optimizer
            return train_locally(local, self.training, self.regularizers, self.rounds, most_steps, keep_optimizer)
        cost = StepCost(parameters=0, gradients=0, optimizer=0, activations=0, flops=0)
        local.log("memory", cost.memory)
        local.log("flops", cost.flops)
        return cost

    def _local_round(self, client: Client, received: Message, round_number: int) -> LocalRound:
        received = from_transport(received, self.transport)
        return LocalRound(client, received, round_number, self.seed, self.objective, self.augmentation)

    def _reply(self, local: LocalRound, aggregators: Iterable[Aggregator]) -> Message:
        model = local.client.model
        travelling = self.schedule.travelling(model, self.plan(model, local.number))
        reply = merge(a.collect(local, travelling) for a in aggregators).copy()
        reply.numbers["samples"] = len(local.client.images)
        reply.metrics.update(local.logged())
        return to_transport({0: reply}, self.transport)[0]

    # What is kept of a client between its rounds

    @property
    def starts_from_server(self) -> bool:
        """Return whether a client's next round replaces all its online weights before anything reads them.

        A part of one's own may leave some as they are, such as BatchNorm's.
        """
        return (
            type(self.local_update).receive is Replace.receive
            and any(type(a).broadcast is WeightedMean.broadcast for a in self.aggregators)
            and type(self.schedule).travelling is Schedule.travelling
            and not self.schedule.cuts
            and not any(r.needs_previous_model for r in self.regularizers)
        )

    def kept_entries(self, model: Model) -> list[str]:
        """Return the state-dict names of a client's model that its next round needs.

        The online weights that the server sends anew are not among them, nor a target network that each round copies.
        """
        renewed = ["online."] if self.starts_from_server else []
        if self.schedule.cuts or self.objective.fresh_target:
            renewed.append("target.")
        return [name for name in model.state_dict() if not name.startswith(tuple(renewed))]

    # What is evaluated

    @property
    def personal(self) -> bool:
        """Return whether each client ends with its own model; otherwise the global model is evaluated."""
        return self.local_update.personal

    def load_global(self, server: Message, build: Callable[[], Model]) -> Model:
        """Return the global model with the server's weights."""
        model = build()
        model.load_state_dict(server.tensors, strict=False)
        if ROUND in server.numbers and isinstance(model.encoder, StagedEncoder):
            model.encoder.use(range(self.plan(model, int(server.numbers[ROUND])).depth))
        return model
