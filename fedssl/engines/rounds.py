"""The rounds of a run, the same under every engine: messages, answers, evaluation and commit."""

import json
import math
import statistics
import time
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..client import Client
from ..data.digests import DATA_DIGESTS, digests_text
from ..errors import UserError
from ..evaluation.evaluate import evaluate_downstream, evaluate_model, pixel_accuracies, sample_sentence
from ..evaluation.verdict import too_short
from ..federation import Federation
from ..guard import CAPPED, REFUSED, TOLD_CAPPED, reasons_in
from ..messages import Message
from ..models.encoders import stem_sentence
from ..models.model import Model
from ..randomness import deterministic_on, seed_for
from ..recipe.presets import PAPER
from ..recipe.recipe import Recipe
from ..run_folder.directory import IMAGE_SHAPE, MetricRow, RunDirectory
from ..run_folder.storage import csv_text
from ..training import steps_of_round
from ..untrusted import quoted
from .observers import Observer, Observers, TensorBoard

#: in the config of the server's state: the last round in which nobody answered, under secure aggregation
_EMPTY = "empty round"
_COLLAPSED = 0.25  # of the highest effective rank of a batch


class Clients(Protocol):
    """The clients as an engine reaches them; everything else of a run is in `run_rounds`."""

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        """Keep the states of the clients that answer; return the answers, and why the other clients gave none."""

    def discard(self, index: int) -> None:
        """Undo this round of a client whose answer was refused."""

    def kept(self, reply: Message) -> Message:
        """Return a reply as the engine keeps it until its round is aggregated: in memory, or on the disk."""
        return reply

    def images(self) -> dict[int, int]:
        """Return the number of training images of each client for which it is known."""

    def epsilons(self) -> dict[int, float]:
        """Return the privacy that each client has spent so far; empty without differential privacy."""
        return {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        """Yield each client, with the measures and spectrum of its own model; see `evaluate_after`."""


def first_files(federation: Federation) -> dict[str, str]:
    """Return the files that a run's folder holds before its first round, as text by name."""
    counts = [[k, *row] for k, row in enumerate(federation.class_counts.tolist())]
    shape = dict(zip(("channels", "height", "width"), federation.dataset.train_images.shape[1:], strict=True))
    return {
        "recipe.yaml": federation.recipe.to_yaml(),
        "partition.csv": csv_text([["client", *federation.dataset.counted_as], *counts]),
        IMAGE_SHAPE: json.dumps(shape) + "\n",
        DATA_DIGESTS: digests_text(federation.data_digests()),
    }


def run_rounds(federation: Federation, directory: RunDirectory, observer: Observer, clients: Clients) -> RunDirectory:
    """Run the rounds that are left, commit each, call TensorBoard and then `observer`, and return the run's folder."""
    recipe = federation.recipe
    first = directory.checkpoint.round + 1
    patient = recipe.evaluation.patience is not None
    viewed = {n for n, _, metric, _ in directory.read_metrics() if metric == "view_retrieval"} if patient else set()
    observers = Observers([TensorBoard(), observer])
    observers.run_began(recipe, directory.path, first)
    try:
        for sentence in _told_before(federation) if first == 0 else ():
            observers.inform(sentence)
        for number in range(first, recipe.rounds + 1):
            if ended := _no_gain(recipe, directory, viewed):
                observers.inform(ended)
                break
            started = time.perf_counter()
            server, rows, missing = _round(federation, directory, clients, number, observers)
            rows += _evaluate(federation, directory, number, server, clients, observers)
            directory.append_metrics(rows)
            capped = {k: f"{TOLD_CAPPED}{reason}" for k, reason in reasons_in(server, CAPPED).items()}
            directory.append_refused(number, missing | reasons_in(server, REFUSED) | capped)
            directory.append_timing(number, time.perf_counter() - started)
            means = {metric: value for _, who, metric, value in rows if who in ("mean", "global")}
            viewed |= {number} if "view_retrieval" in means else set()
            measured = means.get("view_retrieval") if recipe.evaluation.keeps_best and number > 0 else None
            finished, personal = number == recipe.rounds, federation.method.personal
            directory.commit(number, server, finished, recipe.checkpoints, measured, personal)
            observers.round_ended(number, rows)
    finally:
        observers.run_ended(finished=directory.checkpoint.finished)
    return directory


def _no_gain(recipe: Recipe, directory: RunDirectory, viewed: set[int]) -> str | None:
    """Return that a run ends before its last round, as evaluations have found nothing better; else None.

    `viewed` are the rounds in which views were measured.
    """
    patience, best, last = recipe.evaluation.patience, directory.checkpoint.best, directory.checkpoint.round
    if patience is None or best is None or not evaluation_due(recipe, last):
        return None
    if sum(number > best.round for number in viewed) < patience:
        return None
    goes_on = f"; fedssl run --resume {quoted(directory.path)} evaluation.patience=null goes on"
    return (
        f"the run ends after round {last} of {recipe.rounds}: {patience} evaluations found nothing better than round "
        f"{best.round}{'' if recipe.engine == 'flower' else goes_on}"
    )


def _told_before(federation: Federation) -> Iterator[str]:
    """Yield what a user should know before a run that takes long: costly stems, too few steps, and what is measured."""
    recipe, dataset = federation.recipe, federation.dataset
    if recipe.model.stem == "auto" and not recipe.preset.startswith(PAPER):
        clients = {name: k for k, name in enumerate(recipe.architectures[: recipe.partition.clients])}
        yield from filter(None, (stem_sentence(name, federation.new_model(k).encoder) for name, k in clients.items()))
    images = sum(map(len, federation.client_rows)) if recipe.schedule.trains and recipe.preset != "none" else 0
    options = recipe.model_dump(include={"model", "training", "partition", "clients_per_round", "rounds"})
    if short := too_short(options, images):
        yield short
    if len(dataset.measured_images):
        yield sample_sentence(dataset, recipe.evaluation.images, seed_for(recipe.seed, "evaluation"))


def _round(
    federation: Federation, directory: RunDirectory, clients: Clients, number: int, observer: Observer
) -> tuple[Message, list[MetricRow], dict[int, str]]:
    """Run a round, see `_exchange` for what is returned; in round 0 only some methods ask the clients."""
    recipe, method, images = federation.recipe, federation.method, clients.images()
    if number == 0:
        server = method.initial_state()
        if not method.opening_round:
            return server, [], {}
        chosen = answering = list(range(len(federation.client_rows)))
        sent = method.broadcast_opening(server, chosen)
    else:
        server = directory.server_state()
        chosen = federation.sampled_clients(number)
        answering = federation.answering_clients(number, chosen)
        sent = method.broadcast(server, chosen, number)
        steps = [steps_of_round(recipe.training, images.get(k, 0) if recipe.schedule.trains else 0) for k in answering]
        observer.training_began(number, [count * recipe.training.batch_size for count in steps])
    rows = [(number, str(k), "bytes_down", float(m.num_bytes)) for k, m in sent.items() if number or m.num_bytes]
    asked = {k: sent[k] for k in answering}
    server, replies, answer_rows, missing = _exchange(federation, server, asked, clients, number, observer)
    rows += answer_rows
    if number == 0:
        return server, rows, missing
    rows += [(number, str(k), "dropped", 1.0) for k in chosen if k not in asked]
    rows += [(number, str(k), "images", float(images[k])) for k in replies if k in images]
    epsilons = {k: epsilon for k, epsilon in clients.epsilons().items() if math.isfinite(epsilon)}  # inf: no noise
    rows += [(number, str(k), "epsilon", epsilon) for k, epsilon in epsilons.items()]
    if epsilons:
        rows.append((number, "global", "epsilon", max(epsilons.values())))
    if recipe.clients_per_round or recipe.client_dropout:
        rows.append((number, "global", "answers", float(len(replies))))
    server_metrics = {name.rpartition("/")[0] for name in server.metrics}  # not counted as metrics of the clients
    for metric in sorted({name for reply in replies.values() for name in reply.metrics} - server_metrics):
        values = {k: reply.metrics[metric] for k, reply in replies.items() if metric in reply.metrics}
        rows += [(number, str(k), metric, value) for k, value in values.items()]
        rows.append((number, "mean", metric, sum(values.values()) / len(values)))
    for name, value in server.metrics.items():
        metric, _, who = name.rpartition("/")
        rows.append((number, who, metric, value))
    if recipe.training.stop_at_collapse:
        kept = [reply.metrics["rank_kept"] for reply in replies.values() if "rank_kept" in reply.metrics]
        _require_rank(number, kept, recipe.objective.name)
    return server, rows, missing


def _require_rank(number: int, kept: list[float], objective: str) -> None:
    """Raise a UserError if the batches of most clients have lost most of their effective rank.

    A single client's may fall while it learns well, where nearly all of its images are of one kind.
    """
    if kept and (left := statistics.median_high(kept)) < _COLLAPSED:
        raise UserError(
            f"round {number}: the representations collapse: at its end a batch has {100 * left:.0f} % of the highest "
            "effective rank before, or less, and its views find one another more rarely, in most clients; lower "
            f"training.learning_rate, or take {'larger batches' if objective == 'simclr' else 'objective simclr'} "
            "(training.stop_at_collapse=false goes on)"
        )


def _exchange(
    federation: Federation, server: Message, sent: dict[int, Message], clients: Clients, number: int, observer: Observer
) -> tuple[Message, dict[int, Message], list[MetricRow], dict[int, str]]:
    """Send the messages, collect and aggregate; return (state, accepted replies, metric rows, missing reasons)."""
    replies, missing = clients.answers(number, sent)
    for k, reason in missing.items():
        observer.warn(f"round {number}: client {k} is left out: {reason}")
    reasons = [f"client {k}: {reason}" for k, reason in missing.items()]
    # Under secure aggregation one such round changes nothing, and the next round begins.
    empty = bool(sent) and not replies
    secure = federation.recipe.flower.secure_aggregation is not None
    if empty and not (secure and number < federation.recipe.rounds and server.config.get(_EMPTY) != number - 1):
        least = federation.recipe.guard.minimum_answers
        problem = f"round {number}: 0 of {len(sent)} clients answered, but guard.minimum_answers is {least}"
        raise UserError("; ".join([problem, *reasons]))
    try:
        server = federation.method.aggregate(server, replies, number, clients.images(), clients.kept)
    except UserError as error:
        raise UserError("; ".join([str(error), *reasons])) from error
    if empty:
        server.config[_EMPTY] = number
    refused, capped = reasons_in(server, REFUSED), reasons_in(server, CAPPED)
    for k, reason in refused.items():
        observer.warn(f"round {number}: the answer of client {k} is left out: {reason}")
        del replies[k]
        clients.discard(k)
    for k, reason in capped.items():
        observer.warn(f"round {number}: client {k} is capped: {reason}")
    rows = [(number, str(k), "bytes_up", float(message.num_bytes)) for k, message in replies.items()]
    for metric, told in (("missing", missing), ("refused", refused), ("capped", capped)):
        rows += [(number, str(k), metric, 1.0) for k in told]
    return server, replies, rows, missing


def _evaluate(
    federation: Federation, directory: RunDirectory, number: int, server: Message, clients: Clients, observer: Observer
) -> list[MetricRow]:
    """Evaluate the clients' models or the global one if it is due, and return the rows; write the last spectra."""
    if not evaluation_due(federation.recipe, number):
        return []
    observer.evaluation_began(number)
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
        metrics, spectra["global"] = evaluate_after(federation, _global_model(federation, server), number)
        rows += [(number, "global", metric, value) for metric, value in metrics.items()]
    if number == 0 and rows:
        options, seed = federation.recipe.evaluation, seed_for(federation.recipe.seed, "evaluation")
        pixels = pixel_accuracies(federation.dataset, options, seed)
        rows += [(0, rows[-1][1], metric, value) for metric, value in pixels.items()]
    if number == federation.recipe.rounds:
        directory.write_spectra(spectra)
    return rows


def evaluation_due(recipe: Recipe, number: int) -> bool:
    """Return true if models are evaluated after this round: before and after training, and every few rounds between."""
    return number in (0, recipe.rounds) or bool(recipe.evaluation.every and number % recipe.evaluation.every == 0)


def evaluate_after(federation: Federation, model: Model, number: int) -> tuple[dict[str, float], Tensor]:
    """Evaluate a model after a round: measures by name, and the singular values of the test representations.

    See `evaluate_model` for the measures. Linear accuracy and other data are measured before and after training alone,
    fine-tuning after it. A server without data measures on other data alone.
    """
    recipe, dataset = federation.recipe, federation.dataset
    options, views, seed = recipe.evaluation, recipe.augmentation, seed_for(recipe.seed, "evaluation")
    measures: dict[str, float] = {}
    spectrum = torch.empty(0, dtype=torch.float64)
    at_an_end, after = number in (0, recipe.rounds), number == recipe.rounds
    with deterministic_on(model.device, recipe.training.deterministic):
        if len(dataset.measured_images):
            fine_tune = after and dataset.labelled
            measures, spectrum = evaluate_model(
                model, dataset, options, seed, linear=at_an_end, fine_tune=fine_tune, augmentation=views
            )
        if at_an_end:
            measures |= evaluate_downstream(model, federation.downstream, options, seed, views, after)
    return measures, spectrum


def models_to_evaluate(federation: Federation, directory: RunDirectory) -> Iterator[tuple[str, Model]]:
    """Yield the method's models, one at a time: each client and its own model, or "global" and the global model."""
    if federation.method.personal:
        for k in range(len(federation.client_rows)):
            yield str(k), federation.client(k, directory.client_state(k)).model
    else:
        yield "global", _global_model(federation, directory.server_state())


def _global_model(federation: Federation, server: Message) -> Model:
    return federation.method.load_global(server, lambda: federation.new_model(None))


class ClientTrainer:
    """Trains and evaluates one client at a time, whose answer does not depend on which clients came before."""

    def __init__(self, federation: Federation):
        self._federation = federation
        self._models: dict[str, Model] = {}  # the last client's of each architecture, into which the next one is loaded

    def train(self, index: int, state: Message, received: Message, number: int) -> tuple[Message, Message]:
        """Return a client's answer to a round's message, and its state after it, which the next call may change."""
        client = self._load(index, state)
        reply = self._federation.method.client_round(client, received, number)
        return reply, self._federation.state_in_place(client, number)

    def evaluate(self, index: int, state: Message, number: int) -> tuple[dict[str, float], Tensor]:
        """Evaluate a client's own model, see `evaluate_after`."""
        return evaluate_after(self._federation, self._load(index, state).model, number)

    def _load(self, index: int, state: Message) -> Client:
        architecture = self._federation.recipe.architecture_of(index)
        client = self._federation.client(index, state, self._models.get(architecture))
        self._models[architecture] = client.model
        return client
