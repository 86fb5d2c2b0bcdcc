"""The default engine: all clients one after another in this process."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from ..client_states import ClientStates
from ..errors import UserError
from ..evaluation.evaluate import evaluate_model
from ..federation import Federation, build_federation
from ..guard import refused_in
from ..messages import METRIC, Message
from ..models.model import Model
from ..randomness import seed_for
from ..recipe import Recipe, load_recipe
from ..run_directory import MetricRow, RunDirectory


class Progress(Protocol):
    """What an engine tells while it runs; the command line draws bars from it."""

    def start(self, first_round: int, rounds: int) -> None: ...
    def client(self, round_number: int, index: int, position: int, clients: int) -> None: ...
    def round_done(self, round_number: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Silent:
    """No progress."""

    def start(self, first_round: int, rounds: int) -> None: ...
    def client(self, round_number: int, index: int, position: int, clients: int) -> None: ...
    def round_done(self, round_number: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


def run(recipe: Recipe, path: Path, progress: Progress | None = None, overwrite: bool = False) -> RunDirectory:
    """Run a recipe from its start into a new folder.

    Everything that can be wrong with the input is found before the folder is made.

    Raises:
        UserError: see `load_recipe`, `build_federation` and `RunDirectory`.
    """
    if path.exists() and not overwrite:
        raise UserError(
            f"{path} exists: continue it with fedssl run --resume {path}, or give --overwrite, or another --output"
        )
    federation = build_federation(recipe)
    directory = RunDirectory.create(path, _first_files(federation), overwrite)
    return _run(federation, directory, progress or Silent())


def resume(path: Path, progress: Progress | None = None) -> RunDirectory:
    """Continue a run from its last complete round; a finished run is left as it is.

    The result is bit-identical to that of a run that was never interrupted, on the same machine and thread count.
    """
    directory = RunDirectory.open(path)
    directory.roll_back()
    if directory.checkpoint.finished:
        return directory
    return _run(build_federation(load_recipe(path / "recipe.yaml")), directory, progress or Silent())


def models_to_evaluate(
    federation: Federation, server: Message, client_state: Callable[[int], Message]
) -> Iterator[tuple[str, Model]]:
    """The models that the method ends with, one at a time: (client, its own model), or ("global", that one)."""
    if federation.method.personal:
        for k in range(len(federation.client_rows)):
            yield str(k), federation.client(k, client_state(k)).model
    else:
        yield "global", federation.method.load_global(server, lambda: federation.new_model(None))


def _run(federation: Federation, directory: RunDirectory, progress: Progress) -> RunDirectory:
    rounds = federation.recipe.rounds
    first = directory.checkpoint.round + 1
    states = ClientStates(directory, federation.recipe.client_states)
    progress.start(first, rounds)
    with _tensorboard(directory, first) as write_events:
        for number in range(first, rounds + 1):
            started = time.perf_counter()
            if number == 0:
                server, rows = _opening(federation, states, progress)
            else:
                server, rows = _round(federation, directory.server_state(), states, number, progress)
            rows += _evaluate(federation, directory, number, server, states, progress)
            directory.append_metrics(rows)
            directory.append_refused(number, refused_in(server))
            directory.append_timing(number, time.perf_counter() - started)
            write_events(rows)
            directory.commit(number, server, finished=number == rounds)
            progress.round_done(number, {metric: v for _, who, metric, v in rows if who in ("mean", "global")})
    return directory


def _evaluate(
    federation: Federation,
    directory: RunDirectory,
    number: int,
    server: Message,
    states: ClientStates,
    progress: Progress,
) -> list[MetricRow]:
    """kNN and effective rank every few rounds; before and after training linear too; after it fine-tuning if asked."""
    options, rounds = federation.recipe.evaluation, federation.recipe.rounds
    whole = number in (0, rounds)
    if not whole and not (options.every and number % options.every == 0):
        return []
    progress.note(f"evaluating after round {number}")
    rows: list[MetricRow] = []
    spectra: dict[str, Tensor] = {}

    for who, model in models_to_evaluate(federation, server, states.load):
        metrics, spectra[who] = evaluate_model(
            model,
            federation.dataset,
            options,
            seed_for(federation.recipe.seed, "evaluation"),
            linear=whole,
            fractions=options.semi_supervised if number == rounds else (),
            fine_tune=options.fine_tune if number == rounds else None,
        )
        rows += [(number, who, metric, value) for metric, value in metrics.items()]
    if federation.method.personal:
        for metric in dict.fromkeys(row[2] for row in rows):
            values = [row[3] for row in rows if row[2] == metric]
            rows.append((number, "mean", metric, sum(values) / len(values)))
    if number == rounds:
        directory.write_spectra(spectra)
    return rows


@contextmanager
def _tensorboard(directory: RunDirectory, first: int) -> Iterator[Callable[[list[MetricRow]], None]]:
    """A writer of rows as TensorBoard events; events of rounds from `first` on are marked as superseded."""
    writer = SummaryWriter(str(directory.path / "tensorboard"), purge_step=first)

    def write(rows: list[MetricRow]) -> None:
        for number, who, metric, value in rows:
            writer.add_scalar(f"{metric}/{who}", value, number)

    try:
        yield write
    finally:
        writer.close()


def _opening(federation: Federation, states: ClientStates, progress: Progress) -> tuple[Message, list[MetricRow]]:
    """Round 0: the server's first state, and each client's answer where the method asks for one."""
    method = federation.method
    server = method.initial_state()
    replies: dict[int, Message] = {}
    sent: dict[int, Message] = {}
    if method.opening_round:
        everyone = list(range(len(federation.client_rows)))
        sent = method.broadcast_opening(server, everyone)
        for k in everyone:
            client = federation.client(k, Message())
            replies[k] = method.open_client(client, sent[k])
            states.store(k, 0, federation.client_state(client))
        server = method.aggregate(server, replies, 0)
    return server, _traffic_rows(0, {k: m for k, m in sent.items() if m.num_bytes}, replies) + _refused_rows(
        0, server, replies, states, progress
    )


def _round(
    federation: Federation, server: Message, states: ClientStates, number: int, progress: Progress
) -> tuple[Message, list[MetricRow]]:
    method = federation.method
    chosen = federation.sampled_clients(number)
    answering = federation.answering_clients(number, chosen)
    sent = method.broadcast(server, chosen, number)
    replies: dict[int, Message] = {}
    for position, k in enumerate(answering):
        progress.client(number, k, position, len(answering))
        client = federation.client(k, states.load(k))
        replies[k] = method.client_round(client, sent[k], number)
        states.store(k, number, federation.client_state(client))
    server = method.aggregate(server, replies, number)
    rows = _traffic_rows(number, sent, replies) + _refused_rows(number, server, replies, states, progress)
    rows += [(number, str(k), "dropped", 1.0) for k in chosen if k not in answering]
    if federation.recipe.clients_per_round or federation.recipe.client_dropout:
        rows.append((number, "global", "answers", float(len(replies))))
    names = sorted({n for reply in replies.values() for n in reply.numbers if n.startswith(METRIC)})
    for name in names:
        values = {k: reply.numbers[name] for k, reply in replies.items() if name in reply.numbers}
        metric = name.removeprefix(METRIC)
        rows += [(number, str(k), metric, value) for k, value in values.items()]
        rows.append((number, "mean", metric, sum(values.values()) / len(values)))
    for name, value in server.numbers.items():
        if name.startswith(METRIC):
            metric, _, who = name.removeprefix(METRIC).rpartition("/")
            rows.append((number, who, metric, value))
    return server, rows


def _refused_rows(
    number: int, server: Message, replies: dict[int, Message], states: ClientStates, progress: Progress
) -> list[MetricRow]:
    """The clients whose answer was left out of a round: told, taken out of the replies, and their round undone."""
    refused = refused_in(server)
    for k, reason in refused.items():
        progress.warn(f"round {number}: the answer of client {k} is left out: {reason}")
        del replies[k]
        states.discard(k)
    return [(number, str(k), "refused", 1.0) for k in refused]


def _traffic_rows(number: int, sent: dict[int, Message], replies: dict[int, Message]) -> list[MetricRow]:
    """Bytes that went down to and came up from each client in a round."""
    rows = [(number, str(k), "bytes_down", float(message.num_bytes)) for k, message in sent.items()]
    return rows + [(number, str(k), "bytes_up", float(message.num_bytes)) for k, message in replies.items()]


def _first_files(federation: Federation) -> dict[str, str]:
    """What a run's folder holds before its first round."""
    names = federation.dataset.class_names
    table = [["client", *names], *([k, *counts] for k, counts in enumerate(federation.class_counts.tolist()))]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return {"recipe.yaml": federation.recipe.to_yaml(), "partition.csv": text.getvalue()}
