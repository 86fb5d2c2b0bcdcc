"""The rounds of a run; the same under every engine."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from ..errors import UserError
from ..evaluation.evaluate import evaluate_downstream, evaluate_model
from ..federation import Federation
from ..guard import refused_in
from ..messages import Message
from ..models.model import Model
from ..randomness import seed_for
from ..recipe.recipe import Recipe
from ..run.directory import IMAGE_SHAPE, MetricRow, RunDirectory
from ..run.storage import cannot_write, csv_text
from ..training import steps_of_round
from .progress import Progress
from .time_left import past_seconds


def models_to_evaluate(
    federation: Federation, server: Message, client_state: Callable[[int], Message]
) -> Iterator[tuple[str, Model]]:
    """The models that the method ends with, one at a time: (client, its own model), or ("global", that one)."""
    if federation.method.personal:
        for k in range(len(federation.client_rows)):
            yield str(k), federation.client(k, client_state(k)).model
    else:
        yield "global", federation.method.load_global(server, lambda: federation.new_model(None))


class Clients(Protocol):
    """How an engine reaches the clients. Everything else of a run is in `run_rounds`, the same for every engine."""

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        """The clients' answers to a round's messages, and why other clients gave none; round 0 is the opening round.

        The states of the clients that answered are kept. They count from the round's commit on.
        """
        ...

    def discard(self, index: int) -> None:
        """Undo this round of a client whose answer was refused."""
        ...

    def kept(self, reply: Message) -> Message:
        """A reply as the engine keeps it until its round is aggregated: in memory, or on the disk."""
        ...

    def images(self) -> dict[int, int]:
        """How many training images each client has; a client whose number is not known is missing."""
        ...

    def epsilons(self) -> dict[int, float]:
        """The privacy that each client has spent so far; empty without differential privacy."""
        ...

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        """Measures and spectrum of each client's own model after a round; see `evaluate_after`."""
        ...


def run_rounds(federation: Federation, directory: RunDirectory, progress: Progress, clients: Clients) -> RunDirectory:
    """All rounds that are left, each ended by its commit; the same under every engine."""
    rounds = federation.recipe.rounds
    first = directory.checkpoint.round + 1
    evaluated = [number for number in range(rounds + 1) if evaluation_due(federation.recipe, number)]
    progress.start(first, rounds, evaluated, past_seconds(directory))
    with _tensorboard(directory, first) as write_events:
        for number in range(first, rounds + 1):
            started = time.perf_counter()
            if number == 0:
                server, rows, missing = _opening(federation, clients, progress)
            else:
                server, rows, missing = _round(federation, directory.server_state(), clients, number, progress)
            rows += _evaluate(federation, directory, number, server, clients, progress)
            directory.append_metrics(rows)
            directory.append_refused(number, missing | refused_in(server))
            directory.append_timing(number, time.perf_counter() - started)
            write_events(number, rows)
            directory.commit(number, server, finished=number == rounds)
            progress.round_done(number, {metric: v for _, who, metric, v in rows if who in ("mean", "global")})
    return directory


def evaluation_due(recipe: Recipe, number: int) -> bool:
    """Whether models are evaluated after this round: before and after training, and every few rounds between."""
    return number in (0, recipe.rounds) or bool(recipe.evaluation.every and number % recipe.evaluation.every == 0)


def evaluate_after(federation: Federation, model: Model, number: int) -> tuple[dict[str, float], Tensor]:
    """kNN and effective rank; before and after training linear too, and other data; after it fine-tuning if asked.

    Without labels they are effective rank, alignment and uniformity, see `evaluate_model`. A server without data
    measures on other data alone.

    Returns:
        The measures by name, and the singular values of the test representations.
    """
    recipe = federation.recipe
    seed = seed_for(recipe.seed, "evaluation")
    measures: dict[str, float] = {}
    spectrum = torch.empty(0, dtype=torch.float64)
    if len(federation.dataset.measured_images):
        measures, spectrum = evaluate_model(
            model,
            federation.dataset,
            recipe.evaluation,
            seed,
            linear=number in (0, recipe.rounds),
            fine_tune=number == recipe.rounds and federation.dataset.labelled,
            augmentation=recipe.augmentation,
        )
    if number in (0, recipe.rounds):
        after = number == recipe.rounds
        measures |= evaluate_downstream(model, federation.downstream, recipe.evaluation, seed, after=after)
    return measures, spectrum


def _evaluate(
    federation: Federation,
    directory: RunDirectory,
    number: int,
    server: Message,
    clients: Clients,
    progress: Progress,
) -> list[MetricRow]:
    if not evaluation_due(federation.recipe, number):
        return []
    progress.evaluating(number)
    rows: list[MetricRow] = []
    spectra: dict[str, Tensor] = {}
    if federation.method.personal:
        values: dict[str, list[float]] = {}
        for k, metrics, spectra[str(k)] in clients.evaluations(number):
            for metric, value in metrics.items():
                rows.append((number, str(k), metric, value))
                values.setdefault(metric, []).append(value)
        rows += [(number, "mean", metric, sum(each) / len(each)) for metric, each in values.items()]
    elif len(federation.dataset.measured_images) or federation.downstream:  # a server may have no data
        model = federation.method.load_global(server, lambda: federation.new_model(None))
        metrics, spectra["global"] = evaluate_after(federation, model, number)
        rows += [(number, "global", metric, value) for metric, value in metrics.items()]
    if number == federation.recipe.rounds:
        directory.write_spectra(spectra)
    return rows


@contextmanager
def _tensorboard(directory: RunDirectory, first: int) -> Iterator[Callable[[int, list[MetricRow]], None]]:
    """A writer of a round's rows as TensorBoard events; events of rounds from `first` on are marked as superseded."""
    path = directory.path / "tensorboard"

    def write(number: int, rows: list[MetricRow]) -> None:
        try:
            # one event for all values of a round: of a hundred clients, an event each takes as long as some clients
            values = [Summary.Value(tag=f"{metric}/{who}", simple_value=value) for _, who, metric, value in rows]
            writer._get_file_writer().add_summary(Summary(value=values), number)
        except OSError as error:
            raise cannot_write(path, error) from error

    before, threading.excepthook = threading.excepthook, _ignore_full_disk
    try:
        try:
            writer = SummaryWriter(str(path), purge_step=first)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            yield write
        finally:
            with suppress(OSError):  # the same one again; the events are no part of a checkpoint
                writer.close()
    finally:
        threading.excepthook = before


def _ignore_full_disk(error: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread keeps its OSError for the next write to raise; it need not be shown as a traceback, too."""
    if not issubclass(error.exc_type, OSError):
        threading.__excepthook__(error)


def _opening(
    federation: Federation, clients: Clients, progress: Progress
) -> tuple[Message, list[MetricRow], dict[int, str]]:
    """Round 0: the server's first state, and each client's answer where the method asks for one."""
    method = federation.method
    server = method.initial_state()
    if not method.opening_round:
        return server, [], {}
    sent = method.broadcast_opening(server, list(range(len(federation.client_rows))))
    server, replies, rows, missing = _exchange(federation, server, sent, clients, 0, progress)
    return server, _traffic_rows(0, {k: m for k, m in sent.items() if m.num_bytes}, replies) + rows, missing


def _exchange(
    federation: Federation, server: Message, sent: dict[int, Message], clients: Clients, number: int, progress: Progress
) -> tuple[Message, dict[int, Message], list[MetricRow], dict[int, str]]:
    """A round's messages there and back: the server's next state, the answers that count, rows and reasons of the rest.

    A client whose answer was refused or did not arrive is named in a warning and counted in the metric `refused` or
    `missing`; its round is undone.
    """
    replies, missing = clients.answers(number, sent)
    for k, reason in missing.items():
        progress.warn(f"round {number}: client {k} is left out: {reason}")
    # Under secure aggregation a round with too few clients changes nothing, and the next round begins.
    if sent and not replies and federation.recipe.flower.secure_aggregation is None:
        least, reasons = federation.recipe.guard.minimum_answers, [f"client {k}: {why}" for k, why in missing.items()]
        what = f"round {number}: 0 of {len(sent)} clients answered, but guard.minimum_answers is {least}"
        raise UserError("; ".join([what, *reasons]))
    try:
        server = federation.method.aggregate(server, replies, number, clients.images(), clients.kept)
    except UserError as error:
        raise UserError("; ".join([str(error), *(f"client {k}: {why}" for k, why in missing.items())])) from error
    rows = [(number, str(k), "missing", 1.0) for k in missing]
    for k, reason in refused_in(server).items():
        progress.warn(f"round {number}: the answer of client {k} is left out: {reason}")
        del replies[k]
        clients.discard(k)
        rows.append((number, str(k), "refused", 1.0))
    return server, replies, rows, missing


def _round(
    federation: Federation, server: Message, clients: Clients, number: int, progress: Progress
) -> tuple[Message, list[MetricRow], dict[int, str]]:
    chosen = federation.sampled_clients(number)
    answering = federation.answering_clients(number, chosen)
    sent = federation.method.broadcast(server, chosen, number)
    asked = {k: sent[k] for k in answering}
    progress.training(number, _images_to_train_on(federation.recipe, clients, asked))
    server, replies, lost, missing = _exchange(federation, server, asked, clients, number, progress)
    rows = _traffic_rows(number, sent, replies) + lost
    rows += [(number, str(k), "dropped", 1.0) for k in chosen if k not in answering]
    epsilons = {k: epsilon for k, epsilon in clients.epsilons().items() if math.isfinite(epsilon)}  # else no noise
    rows += [(number, str(k), "epsilon", epsilon) for k, epsilon in epsilons.items()]
    if epsilons:
        rows.append((number, "global", "epsilon", max(epsilons.values())))
    if federation.recipe.clients_per_round or federation.recipe.client_dropout:
        rows.append((number, "global", "answers", float(len(replies))))
    of_server = {name.rpartition("/")[0] for name in server.metrics}  # a client's own of these names do not count
    for metric in sorted({name for reply in replies.values() for name in reply.metrics} - of_server):
        values = {k: reply.metrics[metric] for k, reply in replies.items() if metric in reply.metrics}
        rows += [(number, str(k), metric, value) for k, value in values.items()]
        rows.append((number, "mean", metric, sum(values.values()) / len(values)))
    for name, value in server.metrics.items():
        metric, _, who = name.rpartition("/")
        rows.append((number, who, metric, value))
    return server, rows, missing


def _images_to_train_on(recipe: Recipe, clients: Clients, asked: Iterable[int]) -> list[int]:
    """Images that each of the clients asked will train on in a round, counted once for each pass."""
    if not recipe.schedule.trains:
        return [0 for _ in asked]
    images = clients.images()
    return [steps_of_round(recipe.training, images.get(k, 0)) * recipe.training.batch_size for k in asked]


def _traffic_rows(number: int, sent: dict[int, Message], replies: dict[int, Message]) -> list[MetricRow]:
    """Bytes that each client received and sent in a round."""
    rows = [(number, str(k), "bytes_down", float(message.num_bytes)) for k, message in sent.items()]
    return rows + [(number, str(k), "bytes_up", float(message.num_bytes)) for k, message in replies.items()]


def first_files(federation: Federation) -> dict[str, str]:
    """What a run's folder holds before its first round."""
    names = federation.dataset.counted_as
    table = [["client", *names], *([k, *counts] for k, counts in enumerate(federation.class_counts.tolist()))]
    shape = dict(zip(("channels", "height", "width"), federation.dataset.train_images.shape[1:], strict=True))
    return {
        "recipe.yaml": federation.recipe.to_yaml(),
        "partition.csv": csv_text(table),
        IMAGE_SHAPE: json.dumps(shape) + "\n",
    }
