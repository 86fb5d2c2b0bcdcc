"""What a recipe will need, before any training: memory, operations and traffic, for each round and in total.

Nothing comes from formulas. The rounds' messages are the method's own, and one real step of each kind of round is
counted (accounting.py) by the code that trains; so a run of the recipe logs the same figures.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from rich.table import Table as TextTable

from ..accounting import StepCost, StepCounter
from ..client import Client
from ..data.augmentation import normalize
from ..errors import UserError
from ..federation import Federation
from ..messages import Message
from ..models.model import Model

#: batch sizes of the steps that are counted on a CPU; what a step takes is a polynomial of degree two in the batch size
#: (one for layers, two where a term compares all images with all), so three sizes give it exactly for every other
_SIZES = (2, 3, 4)
_RATE = 1e-9  # of the steps that are counted

Note = Callable[[str], None]


@dataclass(frozen=True)
class RoundCost:
    """One round.

    Attributes:
        number: the round; 0 is the opening round, where there is one.
        stage: the schedule's stage, from 1; 0 in the opening round.
        step: what one step takes at the recipe's batch size, by client; empty in the opening round.
        flops: operations of the whole round, by client who answers.
        bytes_down: by client who is asked; bytes_up: by client who answers.
        one_view_flops: operations of one pass of one image through the online network, by client: what the LW-FedSSL
            paper counts.
    """

    number: int
    stage: int
    step: dict[int, StepCost]
    flops: dict[int, int]
    bytes_down: dict[int, int]
    bytes_up: dict[int, int]
    one_view_flops: dict[int, int]


def estimate(federation: Federation, newcomers: bool = False, note: Note = lambda text: None) -> list[RoundCost]:
    """What every round will take; who is sampled and who drops out is drawn as the run will draw it.

    Clients whose answers have equal sizes stand for each other, so a step of each kind of round is run once for every
    architecture (on a CPU three small steps, extrapolated exactly to the batch size). Broken answers, which the guard
    will refuse, are not foreseen.

    Args:
        federation: see `build_federation`.
        newcomers: as if every client took part for the first time in every round: the most that layers which arrive
            late can cost (the LW-FedSSL paper's worst case, section 4.3).
        note: told what is being counted.

    Raises:
        UserError: a step fails, as where its loss is not finite.
    """
    return _Estimate(federation, newcomers, note).rounds()


@dataclass(frozen=True)
class _ClientRound:
    """A client's part in a round, and the stage in which it took part last; None where it never did."""

    client: int
    number: int
    stage: int
    last_stage: int | None
    received: Message


class _Estimate:
    def __init__(self, federation: Federation, newcomers: bool, note: Note):
        self.federation, self.newcomers, self.note = federation, newcomers, note
        self.method = federation.method
        # others send what has a client's own name, or depends on its images
        self.only_weights = all(a.exchanges_weights for a in self.method.aggregators)
        self.compares_stages = any(r.needs_previous_model for r in self.method.regularizers)
        self.replies: dict[tuple[object, ...], Message | int] = {}
        self.steps: dict[tuple[object, ...], tuple[StepCost, int]] = {}
        self.memories: dict[tuple[object, int | None], Message] = {}
        self.models: dict[str, Model] = {}
        self.opened: dict[int, Message] = {}
        self.counted: dict[tuple[object, ...], StepCost] = {}

    def rounds(self) -> list[RoundCost]:
        federation, method = self.federation, self.method
        server = method.initial_state()
        found = []
        if method.opening_round:
            server, opening = self._opening(server)
            found.append(opening)
        last_stages: dict[int, int] = {}
        for number in range(1, federation.recipe.rounds + 1):
            chosen = federation.sampled_clients(number)
            answering = federation.answering_clients(number, chosen)
            sent = method.broadcast(server, chosen, number)
            rounds = [_ClientRound(k, number, self._stage(number), last_stages.get(k), sent[k]) for k in answering]
            replies = {one.client: self._reply(one) for one in rounds}
            costs = {one.client: self._step(one) for one in rounds}
            found.append(
                RoundCost(
                    number,
                    self._stage(number),
                    {k: step for k, (step, _) in costs.items()},
                    {k: step.flops * self._steps_of(k) for k, (step, _) in costs.items()},
                    {k: message.num_bytes for k, message in sent.items()},
                    {k: reply if isinstance(reply, int) else reply.num_bytes for k, reply in replies.items()},
                    {k: one_view for k, (_, one_view) in costs.items()},
                )
            )
            if not self.newcomers:
                last_stages |= dict.fromkeys(answering, self._stage(number))
                server = self._next(server, replies, number)
        return found

    def _opening(self, server: Message) -> tuple[Message, RoundCost]:
        everyone = list(range(len(self.federation.client_rows)))
        sent = self.method.broadcast_opening(server, everyone)
        replies = {}
        for k in everyone:
            client = self._client(k)
            replies[k] = self.method.client_round(client, sent[k], 0)
            self.opened[k] = client.memory
        up = {k: reply.num_bytes for k, reply in replies.items()}
        down = {k: message.num_bytes for k, message in sent.items() if message.num_bytes}
        return self.method.aggregate(server, replies, 0), RoundCost(0, 0, {}, {}, down, up, {})

    def _next(self, server: Message, replies: dict[int, Message | int], number: int) -> Message:
        """The server's next state, but for the weights: they change and keep their sizes."""
        state = Message(dict(server.tensors), dict(server.numbers), dict(server.config))
        for aggregator in self.method.aggregators:
            if replies and not aggregator.exchanges_weights:
                whole = {k: reply for k, reply in replies.items() if isinstance(reply, Message)}
                changed = aggregator.aggregate(server, whole)
                state.tensors.update(changed.tensors)
                state.numbers.update(changed.numbers)
                state.config.update(changed.config)
        state.numbers.update(self.method.note_answers(replies, number))
        return state

    def _kind(self, one: _ClientRound) -> tuple[object, ...]:
        """What rounds have in common whose steps take the same."""
        kind: tuple[object, ...] = (self.federation.recipe.architecture_of(one.client),)
        if self.method.global_model is not None:
            plan = self.method.plan(self.method.global_model, one.number)
            kind += plan.stage, len(plan.active), len(plan.frozen)
        if self.compares_stages:
            kind += (one.last_stage == one.stage,)
        # weights that arrive are put into place; other things are worked on
        return kind if self.only_weights else (*kind, one.received.num_bytes)

    def _stage(self, number: int) -> int:
        model = self.method.global_model
        return self.method.plan(model, number).stage if model is not None else 1

    def _steps_of(self, client: int) -> int:
        options = self.method.training
        return options.local_epochs * (len(self.federation.client_rows[client]) // options.batch_size)

    def _reply(self, one: _ClientRound) -> Message | int:
        """A client's answer, or its bytes where no other part needs the answer itself."""
        key = (*self._kind(one), one.last_stage is None)
        if not self.only_weights:
            key += (one.client,)
        if key not in self.replies:
            reply, _ = self._run(one, self._batch_sizes()[0])
            self.replies[key] = reply.num_bytes if self.only_weights else reply
        return self.replies[key]

    def _step(self, one: _ClientRound) -> tuple[StepCost, int]:
        """What a step takes at the recipe's batch size, and one pass of one image through the online network."""
        kind = self._kind(one)
        if kind not in self.steps:
            self.note(f"counting a step of round {one.number} ({self.federation.recipe.architecture_of(one.client)})")
            sizes = self._batch_sizes()
            counted = []
            for size in sizes:
                key = (*kind, size)
                if key not in self.counted:
                    self._run(one, size)
                counted.append(self.counted[key])
            wanted = self.method.training.batch_size
            step = StepCost(
                **{
                    field.name: _at(wanted, sizes, [getattr(cost, field.name) for cost in counted])
                    for field in fields(StepCost)
                }
            )
            self.steps[kind] = step, self._one_view(one)
        return self.steps[kind]

    def _batch_sizes(self) -> Sequence[int]:
        wanted = self.method.training.batch_size
        return (wanted,) if wanted <= _SIZES[-1] or self.federation.device.type == "cuda" else _SIZES

    def _run(self, one: _ClientRound, batch_size: int) -> tuple[Message, StepCost]:
        """One step of a client that remembers what such clients remember."""
        owner: object = self.federation.recipe.architecture_of(one.client) if self.only_weights else one.client
        client = self._client(one.client)
        if one.last_stage is None:
            client.memory = self.opened.get(one.client, Message()).copy()
        else:
            client.memory = self.memories[owner, one.last_stage if self.compares_stages else None].copy()
        # A step costs the same at any rate; on a few images the recipe's own can send the weights to infinity.
        options = self.method.training.model_copy(update={"batch_size": batch_size, "learning_rate": _RATE})
        method = replace(self.method, training=options)
        reply, cost = method.counted_round(client, one.received, one.number, most_steps=1)
        for stage in (one.stage, None):
            self.memories.setdefault((owner, stage), client.memory)
        self.counted.setdefault((*self._kind(one), batch_size), cost)
        return reply, cost

    def _client(self, index: int) -> Client:
        """A client with a model of its architecture, which others have used before: what it holds does not matter."""
        name = self.federation.recipe.architecture_of(index)
        if name not in self.models:
            self.models[name] = self.federation.new_model(index)
        self.models[name].zero_grad()  # a run's client starts without gradients, so of other layers neither
        data, rows = self.federation.dataset, self.federation.client_rows[index]
        images, labels = data.train_images[rows], data.train_labels[rows]
        return Client(index, images, labels, data.public_images, self.models[name])

    def _one_view(self, one: _ClientRound) -> int:
        client = self._client(one.client)
        self.method.schedule.prepare(client.model, self.method.plan(client.model, one.number))
        client.model.eval()  # a single image has no batch statistics
        counter = StepCounter(client.model)
        with counter.forward():
            client.model.represent(normalize(client.images[:1].to(client.model.device)))
        return counter.flops


def format_costs(costs: Sequence[RoundCost]) -> TextTable:
    """A line a stage and one for all rounds. Memory is the largest client's; traffic the mean of a client's round."""
    from .report import format_bytes  # here, as what draws takes a second to import

    table = TextTable(box=None, pad_edge=False)
    for column in ("stage", "rounds", "memory", "activations", "FLOPs a step", "FLOPs a round", "down", "up"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in sorted({cost.stage for cost in costs}):
        mine = [cost for cost in costs if cost.stage == stage]
        steps = [step for cost in mine for step in cost.step.values()]
        flops = [value for cost in mine for value in cost.flops.values()]
        down = [value for cost in mine for value in cost.bytes_down.values()]
        up = [value for cost in mine for value in cost.bytes_up.values()]
        largest = max(steps, key=lambda step: step.memory, default=None)
        table.add_row(
            "opening" if stage == 0 else str(stage),
            str(len(mine)),
            format_bytes(largest.memory) if largest else "-",
            format_bytes(largest.activations) if largest else "-",
            format_flops(max(step.flops for step in steps)) if steps else "-",
            format_flops(_mean(flops)) if flops else "-",
            format_bytes(_mean(down)),
            format_bytes(_mean(up)),
        )
    total = totals(costs)
    table.add_row(
        "all", str(len(costs)), format_bytes(total["memory"]), "", "", format_flops(total["flops"]),
        format_bytes(total["bytes_down"]), format_bytes(total["bytes_up"]),
    )  # fmt: skip
    return table


def totals(costs: Sequence[RoundCost]) -> dict[str, int]:
    """`memory`: the most that any step takes; `flops`, `bytes_down`, `bytes_up`: of all clients in all rounds."""
    return {
        "memory": max((step.memory for cost in costs for step in cost.step.values()), default=0),
        "flops": sum(sum(cost.flops.values()) for cost in costs),
        "bytes_down": sum(sum(cost.bytes_down.values()) for cost in costs),
        "bytes_up": sum(sum(cost.bytes_up.values()) for cost in costs),
    }


def costs_as_csv(costs: Sequence[RoundCost]) -> str:
    """A line a client and round: what a run's metrics.csv will hold, in bytes and operations."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    parts = [field.name for field in fields(StepCost)]
    writer.writerow(
        ["round", "stage", "client", "memory", *parts[:-1], "flops_a_step", "flops", "bytes_down", "bytes_up"]
    )
    for cost in costs:
        for client in sorted({*cost.bytes_down, *cost.bytes_up}):
            step = cost.step.get(client)
            taken = [step.memory, *(getattr(step, name) for name in parts)] if step else [""] * (1 + len(parts))
            traffic = [cost.bytes_down.get(client, 0), cost.bytes_up.get(client, 0)]
            writer.writerow([cost.number, cost.stage, client, *taken, cost.flops.get(client, ""), *traffic])
    return text.getvalue()


def format_flops(count: float) -> str:
    """`812 M`, `4.1 G`, `20.5 T`."""
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e15:,.1f} P"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _at(size: int, sizes: Sequence[int], values: Sequence[int]) -> int:
    """The polynomial through the values at some sizes, at another size (Lagrange), without rounding."""
    total = Fraction(0)
    for i, value in enumerate(values):
        term = Fraction(value)
        for j, other in enumerate(sizes):
            if j != i:
                term *= Fraction(size - other, sizes[i] - other)
        total += term
    if total.denominator != 1:
        raise UserError(
            f"what a step takes at batch sizes {list(sizes)} ({list(values)}) foretells nothing for {size}; "
            f"count it with training.batch_size={sizes[-1]}"
        )
    return int(total)
