"""What a recipe will need, before any training: memory, operations and traffic, for each round and in total.

No formula is involved. The rounds' messages are the method's own, and the training code runs one real step of each kind
of round, which is counted (accounting.py). A run of the recipe therefore logs the same figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

import torch
from rich.table import Table as TextTable

from ..accounting import ProductsLeftOut, StepCost, StepCounter
from ..client import Client
from ..data.pixels import normalize
from ..data.stored_images import images_of_rows
from ..errors import UserError
from ..federation import Federation
from ..messages import Message, from_transport
from ..models.model import Model
from ..regularizers.base import Regularizer
from ..run.storage import csv_text
from ..training import steps_of_round


def format_bytes(count: float) -> str:
    """Bytes in decimal units: `0`, `812 B`, `4.1 kB`, `20.5 MB`, `1.3 GB`."""
    if count < 1000:
        return f"{count:.0f} B" if count else "0"
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:,.1f} GB"


def format_flops(count: float) -> str:
    """Floating-point operations: `812.0 M`, `4.1 G`, `20.5 T`, `1.2 P`."""
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e15:,.1f} P"


#: Batch sizes of the steps that are counted on a CPU. What a step takes is a polynomial in the batch size: of degree
#: one for layers, two where a term compares each image with each. So three sizes determine it at any other size.
_BATCH_SIZES = (2, 3, 4)


#: learning rate of the steps that are counted
_LEARNING_RATE = 1e-9


#: seconds that the timing of one kind of step should take; the batch is smaller than the recipe's where it must be
_TIMED_SECONDS = 0.8


_SMALLEST_BATCH = 2


_TIMED_STEPS = 3


Note = Callable[[str], None]


@dataclass(frozen=True)
class RoundCost:
    """What one round takes, by client.

    Attributes:
        number: the round; 0 is the opening round, where there is one.
        stage: the schedule's stage, from 1; 0 in the opening round.
        step: what one step takes at the recipe's batch size; empty in the opening round.
        flops: operations of the whole round, of the clients who answer.
        bytes_down: what is sent to the clients who are asked.
        bytes_up: what is received from the clients who answer.
        one_view_flops: operations of one image's pass through the online network; the LW-FedSSL paper counts them.
        step_seconds: seconds of one step at the recipe's batch size, measured here; only of rounds that are timed.
    """

    number: int
    stage: int
    step: dict[int, StepCost]
    flops: dict[int, int]
    bytes_down: dict[int, int]
    bytes_up: dict[int, int]
    one_view_flops: dict[int, int]
    step_seconds: dict[int, float] = field(default_factory=dict)


def estimate(
    federation: Federation,
    newcomers: bool = False,
    note: Note = lambda text: None,
    timed_rounds: Collection[int] = (),
    without_products: bool = False,
    only_rounds: Collection[int] | None = None,
) -> list[RoundCost]:
    """Count what every round will take. Who is sampled and who drops out is drawn as in the run itself.

    Clients with answers of equal size are counted once: a step of each kind of round is run once for each
    architecture. On a CPU three small steps are run, which give the figure at the recipe's batch size exactly. Answers
    that the guard will refuse are not foreseen.

    Args:
        federation: see `build_federation`.
        newcomers: count as if every client took part for the first time in every round. This is the most that layers
            which arrive late can cost (the LW-FedSSL paper's worst case, section 4.3).
        note: is called with a line of text for each step that is counted.
        timed_rounds: numbers of rounds whose steps are also timed: about a second for each kind of step.
        without_products: count without computing the products that make up the operations, which is faster. What the
            clients answer is then noise of the right size.
        only_rounds: numbers of the rounds that are counted (default: all); the clients take no part in the others.

    Returns:
        One entry a round, in order, with the opening round first where there is one.

    Raises:
        UserError: a step fails, for instance because its loss is not finite.
    """
    return _Estimate(federation, newcomers, note, timed_rounds, without_products).rounds(only_rounds)


@dataclass(frozen=True)
class _ClientRound:
    """One client's part in a round; `last_stage` is the stage in which it took part before, or None."""

    client: int
    number: int
    stage: int
    last_stage: int | None
    received: Message


class _Estimate:
    """The clients' models and memories while the rounds are counted, and what is counted already."""

    def __init__(
        self,
        federation: Federation,
        newcomers: bool,
        note: Note,
        timed_rounds: Collection[int],
        without_products: bool,
    ):
        self.federation, self.newcomers, self.note = federation, newcomers, note
        self.timed_rounds, self.without_products = timed_rounds, without_products
        self.method = federation.method
        # otherwise an answer can contain a client's own name, or depend on its images
        self.only_weights = all(a.exchanges_weights for a in self.method.aggregators)
        self.compares_stages = any(r.needs_previous_model for r in self.method.regularizers)
        self.replies: dict[tuple[object, ...], Message | int] = {}
        self.steps: dict[tuple[object, ...], tuple[StepCost, int]] = {}
        self.seconds: dict[tuple[object, ...], float] = {}
        self.products_left_out = ProductsLeftOut()
        self.memories: dict[tuple[object, int | None], Message] = {}
        self.models: dict[str, Model] = {}
        self.opened: dict[int, Message] = {}
        self.counted: dict[tuple[object, ...], StepCost] = {}

    def rounds(self, only_rounds: Collection[int] | None) -> list[RoundCost]:
        federation, method = self.federation, self.method
        server = method.initial_state()
        costs = []
        if method.opening_round:
            server, opening = self._opening(server)
            costs.append(opening)
        last_stages: dict[int, int] = {}
        for number in range(1, federation.recipe.rounds + 1):
            if only_rounds is not None and number not in only_rounds:
                continue
            chosen = federation.sampled_clients(number)
            answering = federation.answering_clients(number, chosen)
            sent = method.broadcast(server, chosen, number)
            parts = [_ClientRound(k, number, self._stage(number), last_stages.get(k), sent[k]) for k in answering]
            replies = {part.client: self._reply(part) for part in parts}
            steps = {part.client: self._step(part) for part in parts}
            costs.append(
                RoundCost(
                    number,
                    self._stage(number),
                    {k: step for k, (step, _) in steps.items()},
                    {k: step.flops * self._steps_of(k) for k, (step, _) in steps.items()},
                    {k: message.num_bytes for k, message in sent.items()},
                    {k: reply if isinstance(reply, int) else reply.num_bytes for k, reply in replies.items()},
                    {k: one_view for k, (_, one_view) in steps.items()},
                    {part.client: self._step_seconds(part) for part in parts} if number in self.timed_rounds else {},
                )
            )
            if not self.newcomers:
                last_stages |= dict.fromkeys(answering, self._stage(number))
                server = self._next(server, replies, number)
        return costs

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
        """The server's next state. The weights stay as they are: they would change but keep their sizes."""
        state = Message(dict(server.tensors), dict(server.numbers), dict(server.config))
        for aggregator in self.method.aggregators:
            if replies and not aggregator.exchanges_weights:
                whole = {
                    k: from_transport(reply, self.method.transport)
                    for k, reply in replies.items()
                    if isinstance(reply, Message)
                }
                changed = aggregator.aggregate(server, whole)
                state.tensors.update(changed.tensors)
                state.numbers.update(changed.numbers)
                state.config.update(changed.config)
        state.numbers.update(self.method.note_answers(replies, number))
        return state

    def _kind(self, part: _ClientRound) -> tuple[object, ...]:
        """A key that two clients' rounds share where their steps take the same."""
        kind: tuple[object, ...] = (self.federation.recipe.architecture_of(part.client),)
        if self.method.global_model is not None:
            plan = self.method.plan(self.method.global_model, part.number)
            kind += plan.stage, len(plan.active), len(plan.frozen)
        if self.compares_stages:
            kind += (part.last_stage == part.stage,)
        # weights that arrive are only put into place; other things take operations
        return kind if self.only_weights else (*kind, part.received.num_bytes)

    def _stage(self, number: int) -> int:
        model = self.method.global_model
        return self.method.plan(model, number).stage if model is not None else 1

    def _steps_of(self, client: int) -> int:
        return steps_of_round(self.method.training, len(self.federation.client_rows[client]))

    def _reply(self, part: _ClientRound) -> Message | int:
        """A client's answer, or only its size in bytes where clients exchange nothing but weights."""
        key = (*self._kind(part), part.last_stage is None)
        if not self.only_weights:
            key += (part.client,)
        if key not in self.replies:
            reply, _ = self._counted_run(part, self._batch_sizes()[0])
            self.replies[key] = reply.num_bytes if self.only_weights else reply
        return self.replies[key]

    def _step(self, part: _ClientRound) -> tuple[StepCost, int]:
        """What a step takes at the recipe's batch size, and the operations of one image's pass, see `RoundCost`.

        Where processes share the batch, the memory is that of one of them, and the operations those of all.
        """
        kind = self._kind(part)
        if kind not in self.steps:
            self.note(f"counting a step of round {part.number} ({self.federation.recipe.architecture_of(part.client)})")
            sizes = self._batch_sizes()
            counted = []
            for size in sizes:
                key = (*kind, size)
                if key not in self.counted:
                    self._counted_run(part, size)  # which stores it
                counted.append(self.counted[key])
            step = StepCost(
                **{
                    field.name: _extrapolate(self._share(), sizes, [getattr(cost, field.name) for cost in counted])
                    for field in fields(StepCost)
                }
            )
            step = replace(step, flops=step.flops * self.method.training.processes)
            self.steps[kind] = step, self._one_view(part)
        return self.steps[kind]

    def _batch_sizes(self) -> Sequence[int]:
        wanted = self._share()
        at_once = wanted <= _BATCH_SIZES[-1] or self.federation.device.type == "cuda"
        # a single image, which a process may have, has no batch statistics of its own
        return (wanted,) if at_once and wanted >= _BATCH_SIZES[0] else _BATCH_SIZES

    def _share(self) -> int:
        """Images of a batch that one process trains on."""
        return self.method.training.batch_size // self.method.training.processes

    def _step_seconds(self, part: _ClientRound) -> float:
        """Seconds of one step at the recipe's batch size.

        Measured is the difference of a round of several steps and a round of one step, of as many images as fit the
        time; the operations lead from there to the recipe's batch size.
        """
        kind = self._kind(part)
        if kind not in self.seconds:
            size = _SMALLEST_BATCH
            one_step, flops = self._timed_run(part, size, 1)
            larger = min(self.method.training.batch_size, int(size * _TIMED_SECONDS / 4 / one_step))
            if larger > size:
                size = larger
                one_step, flops = self._timed_run(part, size, 1)
            several, _ = self._timed_run(part, size, _TIMED_STEPS)
            a_step = (several - one_step) / (_TIMED_STEPS - 1)
            if a_step <= 0:  # other programs lengthened the run of one step
                a_step = several / _TIMED_STEPS
            self.seconds[kind] = a_step * self._step(part)[0].flops / flops
        return self.seconds[kind]

    def _timed_run(self, part: _ClientRound, batch_size: int, steps: int) -> tuple[float, int]:
        """Seconds of a round of a few steps, and the operations of one of them.

        On a CPU with one thread it is the processor's time, which other programs do not lengthen.
        """
        on_gpu = self.federation.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.federation.device)
        begin, begin_of_processor = time.perf_counter(), time.process_time()
        _, cost = self._run(part, batch_size, steps)
        if on_gpu:
            torch.cuda.synchronize(self.federation.device)
        seconds, of_processor = time.perf_counter() - begin, time.process_time() - begin_of_processor
        return seconds if on_gpu else min(seconds, of_processor), cost.flops

    def _counted_run(self, part: _ClientRound, batch_size: int) -> tuple[Message, StepCost]:
        """One step, without computing its products where the caller wishes it."""
        with self.products_left_out if self.without_products else nullcontext():
            return self._run(part, batch_size)

    def _run(self, part: _ClientRound, batch_size: int, steps: int | None = None) -> tuple[Message, StepCost]:
        """Run one step of a client that remembers what a client with the same past remembers.

        With `steps` that many, and the regularizers take no more images than the batch holds.
        """
        owner: object = self.federation.recipe.architecture_of(part.client) if self.only_weights else part.client
        client = self._client(part.client)
        if part.last_stage is None:
            client.memory = self.opened.get(part.client, Message()).copy()
        else:
            client.memory = self.memories[owner, part.last_stage if self.compares_stages else None].copy()
        # A step takes the same at any learning rate; on few images the recipe's own can send the weights to infinity.
        changes = {
            "batch_size": batch_size,
            "learning_rate": _LEARNING_RATE,
            "local_epochs": steps or 1,
            "local_steps": None,
        }
        method = replace(self.method, training=self.method.training.model_copy(update=changes))
        if steps:
            small = (_with_batch_of(regularizer, batch_size) for regularizer in method.regularizers)
            method = replace(method, regularizers=tuple(small))
        reply, cost = method.counted_round(client, part.received, part.number, most_steps=steps or 1)
        for stage in (part.stage, None):
            self.memories.setdefault((owner, stage), client.memory)
        if not steps:
            self.counted.setdefault((*self._kind(part), batch_size), cost)
        return reply, cost

    def _client(self, index: int) -> Client:
        """A client whose model is shared by all clients of its architecture: its weights' values do not matter."""
        name = self.federation.recipe.architecture_of(index)
        if name not in self.models:
            self.models[name] = self.federation.new_model(index)
        self.models[name].zero_grad()  # as in a run, where a client starts without gradients
        data, rows = self.federation.dataset, self.federation.client_rows[index]
        images, labels = images_of_rows(data.train_images, rows), data.train_labels[rows]
        return Client(index, images, labels, data.public_images, self.models[name])

    def _one_view(self, part: _ClientRound) -> int:
        client = self._client(part.client)
        self.method.schedule.prepare(client.model, self.method.plan(client.model, part.number))
        client.model.eval()  # a single image has no batch statistics
        counter = StepCounter(client.model)
        with counter.forward():
            client.model.represent(normalize(client.images[:1].to(client.model.device)))
        return counter.flops


def format_costs(costs: Sequence[RoundCost]) -> TextTable:
    """A table with a line a stage and one for all rounds.

    Memory is that of the client that needs most, traffic the mean of a client's round.
    """
    table = TextTable(box=None, pad_edge=False)
    for column in ("stage", "rounds", "memory", "activations", "FLOPs a step", "FLOPs a round", "down", "up"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in sorted({cost.stage for cost in costs}):
        of_stage = [cost for cost in costs if cost.stage == stage]
        steps = [step for cost in of_stage for step in cost.step.values()]
        flops = [value for cost in of_stage for value in cost.flops.values()]
        down = [value for cost in of_stage for value in cost.bytes_down.values()]
        up = [value for cost in of_stage for value in cost.bytes_up.values()]
        largest = max(steps, key=lambda step: step.memory, default=None)
        table.add_row(
            "opening" if stage == 0 else str(stage),
            str(len(of_stage)),
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
    """Sum up the rounds of `estimate`.

    Returns:
        Numbers by name. `memory` has the bytes of the step that takes most. `flops`, `bytes_down` and `bytes_up` are of
        all clients in all rounds.
    """
    return {
        "memory": max((step.memory for cost in costs for step in cost.step.values()), default=0),
        "flops": sum(sum(cost.flops.values()) for cost in costs),
        "bytes_down": sum(sum(cost.bytes_down.values()) for cost in costs),
        "bytes_up": sum(sum(cost.bytes_up.values()) for cost in costs),
    }


def costs_as_csv(costs: Sequence[RoundCost]) -> str:
    """A line a client and round, with the figures that a run's metrics.csv will hold, in bytes and operations."""
    parts = [field.name for field in fields(StepCost)]
    header = ["round", "stage", "client", "memory", *parts[:-1], "flops_a_step", "flops", "bytes_down", "bytes_up"]
    rows: list[list[object]] = []
    for cost in costs:
        for client in sorted({*cost.bytes_down, *cost.bytes_up}):
            step = cost.step.get(client)
            taken = [step.memory, *(getattr(step, name) for name in parts)] if step else [""] * (1 + len(parts))
            traffic = [cost.bytes_down.get(client, 0), cost.bytes_up.get(client, 0)]
            rows.append([cost.number, cost.stage, client, *taken, cost.flops.get(client, ""), *traffic])
    return csv_text([header, *rows])


def _with_batch_of(regularizer: Regularizer, most: int) -> Regularizer:
    batch = getattr(regularizer, "batch_size", None)
    return regularizer if batch is None else regularizer.model_copy(update={"batch_size": min(batch, most)})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _extrapolate(size: int, sizes: Sequence[int], values: Sequence[int]) -> int:
    """The value at `size` of the polynomial through the `values` at `sizes` (Lagrange), without rounding."""
    total = Fraction(0)
    for i, value in enumerate(values):
        term = Fraction(value)
        for j, other in enumerate(sizes):
            if j != i:
                term *= Fraction(size - other, sizes[i] - other)
        total += term
    if total.denominator != 1:
        raise UserError(
            f"what a step takes at batch sizes {list(sizes)}, {list(values)}, does not determine what it takes at "
            f"batch size {size}; count with training.batch_size={sizes[-1]} instead"
        )
    return int(total)
