"""The resources that a recipe will need, before any training: memory, operations and traffic, per round and in total.

No formula is involved. The rounds' messages are the method's own, and the training code goes through one step of each
kind of round, at the recipe's batch size and on tensors without numbers, which is counted (training.py, accounting.py).
A run of the recipe therefore logs the same figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import isfinite
from statistics import fmean

from matplotlib.ticker import EngFormatter
from rich.table import Table as TextTable

from ..accounting import StepCost
from ..client import Client
from ..data.stored_images import rows_in_place
from ..errors import UserError
from ..federation import Federation
from ..messages import Message, from_transport
from ..method import Method
from ..models.model import Model
from ..run_folder.storage import csv_text
from ..training import steps_of_round


@dataclass(frozen=True)
class RoundCost:
    """The resources of one round, by client."""

    number: int  # of the round; 0 is the opening round, if there is one
    stage: int  # of the schedule, from 1; 0 in the opening round
    step: dict[int, StepCost]  # at the recipe's batch size; empty in the opening round
    flops: dict[int, int]  # of the whole round, of the clients that answer
    bytes_down: dict[int, int]  # to the clients that are asked
    bytes_up: dict[int, int]  # from the clients that answer


def estimate(federation: Federation) -> list[RoundCost]:
    """Return the resources of every round, in order, with the opening round first if there is one.

    Clients are sampled and drop out as in the run itself; refusals by the guard are not predicted.

    Raises:
        UserError: a step fails, for instance because its loss is not finite, or the images are at sites.
    """
    if federation.recipe.partition.name == "sites":
        raise UserError(
            "the images are at the sites, so no step can be counted here: name images like theirs, for instance "
            "data='{name: npz, path: mine.npz}' partition='{name: iid, clients: 3}'"
        )
    rows, counter = federation.client_rows, _Counter(federation)
    method = counter.method
    server, costs = method.initial_state(), []
    if method.opening_round:
        server, opening = counter.opening_round(server)
        costs.append(opening)
    last_stages: dict[int, int] = {}
    for number in range(1, federation.recipe.rounds + 1):
        chosen = federation.sampled_clients(number)
        answering = federation.answering_clients(number, chosen)
        sent = method.broadcast(server, chosen, number)
        stage = 1 if method.global_model is None else method.plan(method.global_model, number).stage
        counts = {k: counter.count(k, sent[k], number, stage, last_stages.get(k)) for k in answering}
        costs.append(
            RoundCost(
                number,
                stage,
                {k: count.step for k, count in counts.items()},
                {k: count.step.flops * steps_of_round(method.training, len(rows[k])) for k, count in counts.items()},
                {k: message.num_bytes for k, message in sent.items()},
                {k: count.bytes_up for k, count in counts.items()},
            )
        )
        last_stages |= dict.fromkeys(answering, stage)
        server = _next_state(method, server, {k: count.reply for k, count in counts.items()}, number)
    return costs


def _next_state(method: Method, server: Message, replies: dict[int, Message | None], number: int) -> Message:
    """Return the server's next state. The weights stay as they are: they would change but keep their sizes."""
    state = Message(dict(server.tensors), dict(server.numbers), dict(server.config))
    whole = {k: from_transport(reply, method.transport) for k, reply in replies.items() if reply}
    for aggregator in method.aggregators:
        if replies and not aggregator.exchanges_weights:
            changed = aggregator.aggregate(server, whole)
            state.tensors.update(changed.tensors)
            state.numbers.update(changed.numbers)
            state.config.update(changed.config)
    state.numbers.update(method.note_answers(replies, number))
    return state


@dataclass(frozen=True)
class _Count:
    """What a client's part in a round takes; its answer is kept only where more than weights is exchanged."""

    reply: Message | None
    bytes_up: int
    step: StepCost


class _Counter:
    """Counts the clients' parts in the rounds, each kind once; holds the clients' models and memories meanwhile."""

    def __init__(self, federation: Federation):
        self.federation, self.method = federation, federation.method.with_short_server_training()
        # otherwise an answer can contain a client's own name, or depend on its images
        self.only_weights = all(a.exchanges_weights for a in self.method.aggregators)
        self.compares_stages = any(r.needs_previous_model for r in self.method.regularizers)
        self.counts: dict[tuple[object, ...], _Count] = {}
        self.memories: dict[tuple[object, int], Message] = {}  # after a round of a stage
        self.opened: dict[int, Message] = {}
        self.models: dict[str, Model] = {}

    def opening_round(self, server: Message) -> tuple[Message, RoundCost]:
        """Return the server's state after the opening round, and the round's resources."""
        sent = self.method.broadcast_opening(server, list(range(len(self.federation.client_rows))))
        replies = {}
        for k, message in sent.items():
            client = self._client(k)
            replies[k] = self.method.client_round(client, message, 0)
            self.opened[k] = client.memory
        up = {k: reply.num_bytes for k, reply in replies.items()}
        down = {k: message.num_bytes for k, message in sent.items() if message.num_bytes}
        return self.method.aggregate(server, replies, 0), RoundCost(0, 0, {}, {}, down, up)

    def count(self, k: int, received: Message, number: int, stage: int, last_stage: int | None) -> _Count:
        """Return what client k's part in a round takes, who took part before in `last_stage`; each kind counts once."""
        architecture = self.federation.recipe.architecture_of(k)
        kind: tuple[object, ...] = (architecture, last_stage is None)
        if self.method.global_model is not None:
            plan = self.method.plan(self.method.global_model, number)
            kind += plan.stage, len(plan.active), len(plan.frozen)
        if self.compares_stages:
            kind += (last_stage == stage,)
        if not self.only_weights:  # weights that arrive are only put into place; what is asked for may differ by round
            kind += received.num_bytes, k, *sorted(received.config.items())
        if kind not in self.counts:
            client = self._client(k)
            past = architecture if self.only_weights else k  # all clients with the same past have the same memory
            opened = self.opened.get(k, Message())
            client.memory = (opened if last_stage is None else self.memories[past, last_stage]).copy()
            reply, step = self.method.counted_round(client, received, number, most_steps=0)
            self.memories.setdefault((past, stage), client.memory)
            self.counts[kind] = _Count(None if self.only_weights else reply, reply.num_bytes, step)
        return self.counts[kind]

    def _client(self, index: int) -> Client:
        """Return a client that shares its model with all clients of its architecture: the weights do not matter."""
        name = self.federation.recipe.architecture_of(index)
        if name not in self.models:
            self.models[name] = self.federation.new_model(index)
        self.models[name].zero_grad()  # as in a run, where a client starts without gradients
        data, rows = self.federation.dataset, self.federation.client_rows[index]
        images, labels = rows_in_place(data.train_images, rows), data.train_labels[rows]
        return Client(index, images, labels, data.public_images, self.models[name])


def totals(costs: Sequence[RoundCost]) -> dict[str, int]:
    """Return by name `memory`, the bytes of the largest step, and the sums `flops`, `bytes_down` and `bytes_up`."""
    memory = max((step.memory for cost in costs for step in cost.step.values()), default=0)
    summed = ("flops", "bytes_down", "bytes_up")
    return {"memory": memory, **{name: sum(sum(getattr(cost, name).values()) for cost in costs) for name in summed}}


def format_costs(costs: Sequence[RoundCost]) -> TextTable:
    """Return a table by stage and in total: the most memory of a client, the mean traffic of a client's round."""
    table = TextTable(box=None, pad_edge=False)
    for column in ("stage", "rounds", "memory", "activations", "FLOPs a step", "FLOPs a round", "down", "up"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for stage in sorted({cost.stage for cost in costs}):
        rounds = [cost for cost in costs if cost.stage == stage]
        steps = [step for cost in rounds for step in cost.step.values()]
        flops = [value for cost in rounds for value in cost.flops.values()]
        largest = max(steps, key=lambda step: step.memory, default=None)
        table.add_row(
            "opening" if stage == 0 else str(stage),
            str(len(rounds)),
            format_bytes(largest.memory) if largest else "-",
            format_bytes(largest.activations) if largest else "-",
            format_flops(max(step.flops for step in steps)) if steps else "-",
            format_flops(fmean(flops)) if flops else "-",
            format_bytes(fmean([value for cost in rounds for value in cost.bytes_down.values()] or [0])),
            format_bytes(fmean([value for cost in rounds for value in cost.bytes_up.values()] or [0])),
        )
    total = totals(costs)
    table.add_row(
        "all", str(len(costs)), format_bytes(total["memory"]), "", "", format_flops(total["flops"]),
        format_bytes(total["bytes_down"]), format_bytes(total["bytes_up"]),
    )  # fmt: skip
    return table


def costs_as_csv(costs: Sequence[RoundCost]) -> str:
    """Return a line per client and round, with the figures of a run's metrics.csv, in bytes and operations."""
    names = [field.name for field in fields(StepCost)]
    header = ["round", "stage", "client", "memory", *names[:-1], "flops_a_step", "flops", "bytes_down", "bytes_up"]
    rows: list[list[object]] = []
    for cost in costs:
        for client in sorted({*cost.bytes_down, *cost.bytes_up}):
            step = cost.step.get(client)
            figures = [step.memory, *(getattr(step, name) for name in names)] if step else [""] * (1 + len(names))
            traffic = [cost.bytes_down.get(client, 0), cost.bytes_up.get(client, 0)]
            rows.append([cost.number, cost.stage, client, *figures, cost.flops.get(client, ""), *traffic])
    return csv_text([header, *rows])


def format_bytes(count: float, unit: str = "B") -> str:
    """Return bytes as `20.5 MB`, or by `format_flops` operations as `4.1 G`; what is not finite stays as it is."""
    return str(EngFormatter(unit=unit, places=1)(count)) if isfinite(count) else str(count)


format_flops = partial(format_bytes, unit="")
