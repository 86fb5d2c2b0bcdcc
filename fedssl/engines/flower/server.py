"""The server's side of the Flower engine: reach clients by Flower's messages, and make the ServerApp of a deployment.

A message to a client holds the record `task`, which names the client, and in a round the method's message (wire.py):

    query     do your images fit?                   run, version, and the form of the server's images beside it
    train     a round, 0 the opening one            round, the client's last committed round, the rounds of all its
                                                    states that are still needed, whether to evaluate
    evaluate  its own model                         round, the client's last committed round

To a query, the answer's record `answer` holds the number of its images (registration.py). An answer with a record
`failure` holds one line instead of a result.
A client keeps its states on its own disk (site.py) by the round's number. The server names the round to start from, so
that a round that was refused, late or lost with the server is trained again from the same state.
"""

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from torch import Tensor

from ...aggregators.base import PROJECTION
from ...errors import UserError
from ...federation import Federation, build_federation, require_same_data
from ...guard import TOLD_CAPPED, capped_images
from ...messages import Message
from ...options import shortened
from ...recipe.changes import CHANGEABLE, differences
from ...recipe.reading import load_recipe, load_stored_recipe
from ...recipe.recipe import Recipe
from ...run_folder.creation import alone_in, default_folder
from ...run_folder.directory import SITES_RUN, RunDirectory
from ...run_folder.storage import csv_text
from ...untrusted import expand_home, quoted
from ..observers import Observer
from ..progress import ProgressBars
from ..rounds import evaluation_due, first_files, run_rounds
from .messenger import LARGEST_WITHOUT_WEIGHTS, MOST_REASONS, Messenger, one_line
from .privacy import private_federation
from .privacy_accountant import PrivacyAccountant
from .registration import ConnectedClients
from .secure_aggregation import Contents, secure_mean
from .site_files import bound_clients, manifest_of_run, read_manifest
from .wire import (
    SiteEvaluation,
    evaluation_fault,
    flatten_weights,
    from_records,
    on_disk,
    split_evaluation,
    to_shared_records,
    unflatten_mean,
)

#: options that may change when a run continues, as no earlier round depends on them
_CHANGEABLE = tuple(option for option in CHANGEABLE if option.startswith(("flower.", "guard.", "training.")))

#: times the median client's, from which an answer is told to be slow; of fewer answers than that the median says little
_SLOW, _ENOUGH = 10.0, 3

T = TypeVar("T")


class FlowerClients:
    """Clients behind Flower's grid (see `fedssl.engines.rounds.Clients`)."""

    def __init__(
        self, connected: ConnectedClients, federation: Federation, directory: RunDirectory, progress: Observer
    ):
        self._connected, self._messenger = connected, connected.messenger
        self._federation, self._directory, self._progress = federation, directory, progress
        self._options = federation.recipe.flower
        self._accountant = PrivacyAccountant(directory, self._options)
        self._evaluations: dict[int, SiteEvaluation] = {}  # in the round's answers
        self._late: dict[int, str] = {}  # who gave none in time, and what is told of it

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        self._connected.wait_for(set(sent))
        evaluate = self._federation.method.personal and evaluation_due(self._federation.recipe, number)
        contents = to_shared_records({k: message for k, message in sent.items() if k in self._connected.nodes})
        left_out = self._directory.read_refused()
        for k, content in contents.items():
            content["task"] = task = self._task(k, number, evaluate=evaluate)
            start: Any = task["start"]  # the last round of it that counted
            mine = [(n, why) for n, who, why in left_out if who == k and n > start and not why.startswith(TOLD_CAPPED)]
            reasons = [f"round {n}: {why}" for n, why in mine]
            task["left_out"] = reasons[-MOST_REASONS:]
        secure = self._options.secure_aggregation is not None
        self._accountant.begin(number, () if secure else contents)
        if secure:
            replies, missing = self._secure_answers(number, sent, contents)
        else:
            received, missing = self._exchange("train", contents, number, self._read_answer)
            self._evaluations = {k: evaluation for k, (_, evaluation) in received.items()}
            replies = {k: received[k][0] for k in sorted(received)}
            self._accountant.keep_only(number, replies.keys())
        for k in replies:
            self._directory.adopt_client(k, number)
        missing |= {k: self._connected.absence(k) for k in sent if k not in contents}
        return replies, dict(sorted(missing.items()))

    def _read_answer(self, records: RecordDict) -> tuple[Message, SiteEvaluation]:
        reply, evaluation = split_evaluation(from_records(records))
        return self.kept(reply), evaluation

    def _secure_answers(
        self, number: int, sent: dict[int, Message], contents: Contents
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """Return the clients' mean as the answer of each client in it: an average over these is that mean again."""
        if not contents:
            return {}, {}
        model = self._federation.method.global_model
        assert model is not None
        names = self._federation.method.schedule.travelling(model, self._federation.method.plan(model, number))
        before = {name: sent[min(contents)].tensors[name] for name in names}

        def exchange(stage_contents: Contents, collects: bool) -> tuple[Contents, dict[int, str]]:
            if collects:  # again where the protocol begins anew
                self._accountant.begin(number, stage_contents)
            return self._exchange("train", stage_contents, number, lambda records: records)

        size = flatten_weights(before).size
        mean, metrics, missing = secure_mean(self._options, contents, self._connected.nodes, size, exchange)
        self._accountant.keep_only(number, metrics)
        if mean is None:
            return {}, missing
        tensors = unflatten_mean(mean, before)
        return {k: Message(tensors, {"samples": 1}, metrics=metrics[k]) for k in metrics if k not in missing}, missing

    def discard(self, index: int) -> None:
        self._directory.discard_client(index)
        self._evaluations.pop(index, None)
        self._accountant.discard(index)

    def kept(self, reply: Message) -> Message:
        return on_disk(reply, self._directory.path)

    def images(self) -> dict[int, int]:
        return self._connected.images

    def epsilons(self) -> dict[int, float]:
        return self._accountant.epsilons(range(len(self._federation.client_rows)))

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        evaluations = {k: evaluation for k, evaluation in self._evaluations.items() if evaluation[1] is not None}
        self._evaluations = {}
        everyone = range(len(self._federation.client_rows))
        late = {} if self._options.grace is None else self._late  # to wait for them again could take round_seconds
        unknown = [k for k in everyone if k not in evaluations and k not in late and k in self._connected.nodes]
        contents = {k: RecordDict({"task": self._task(k, number, evaluate=True)}) for k in unknown}

        received, missing = self._exchange("evaluate", contents, number, self._read_answer, LARGEST_WITHOUT_WEIGHTS)
        evaluations |= {k: evaluation for k, (_, evaluation) in received.items()}
        for k in everyone:
            absence = (missing | late).get(k) or self._connected.absence(k)
            measures, spectrum = evaluations.get(k, ({}, None))
            fault = evaluation_fault(measures, spectrum) if k in evaluations else absence
            if spectrum is not None and not fault:
                yield k, measures, spectrum
            else:
                self._progress.warn(f"round {number}: client {k} is not evaluated: {fault}")

    def _task(self, client: int, number: int, evaluate: bool) -> ConfigRecord:
        kept = self._directory.client_rounds_kept(client)
        task: dict[str, Any] = {"run": self._connected.run, "client": client, "round": number, "evaluate": evaluate}
        task |= {"start": kept[-1] if kept else -1, "seconds": self._options.round_seconds}
        return ConfigRecord(task | ({"kept": kept} if kept else {}))

    def _exchange(
        self, kind: str, contents: Contents, number: int, read: Callable[[RecordDict], T], largest: int | None = None
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Return clients' answers, which `read` converts or refuses with UserError, and why others do not count."""
        if not contents:
            return {}, {}
        seconds = self._options.round_seconds
        client_of = {self._connected.nodes[k]: k for k in contents}
        node_contents = {node: contents[k] for node, k in client_of.items()}
        waiting = self._messenger.send(kind, node_contents, number, seconds)
        received: dict[int, T] = {}
        reached = {client_of[node] for node in waiting.values()}
        missing = {k: "the round's message could not be sent to it" for k in contents if k not in reached}
        times: dict[int, float] = {}  # of the answers that count
        enough = max(self._federation.recipe.guard.minimum_answers, len(contents) // 2 + 1)

        def patience() -> float:
            grace = self._options.grace
            return math.inf if grace is None or len(times) < enough else max(60.0, grace * median(times.values()))

        size = largest or self._largest_answer(contents)
        for answer in self._messenger.collect(waiting, seconds, size, patience):
            k = client_of[answer.node]
            try:
                if answer.content is None:
                    raise UserError(answer.failure or "its answer is empty")
                received[k] = read(answer.content)
            except UserError as error:
                missing[k] = one_line(str(error))
                continue
            times[k] = answer.after
            self._progress.client_began(number, k, len(received), len(contents))
        self._late = {client_of[n]: f"no answer within {min(seconds, patience()):g} s" for n in waiting.values()}
        missing |= self._late
        usual = median(times.values()) if len(times) >= _ENOUGH else math.inf
        for k in [k for k, after in times.items() if after > max(60.0, _SLOW * usual)]:
            told = f"its answer took {times[k]:.0f} s, where the median client's took {usual:.0f} s"
            self._progress.warn(f"round {number}: client {k} is slow: {told} (flower.grace ends such a wait)")
        return received, missing

    def _largest_answer(self, contents: Contents) -> int:
        """Return the limit of an answer: 256 MiB + 4 x sent + 4 x model + 64 KiB a public image + projections."""
        method, images = self._federation.method, self._federation.dataset.public_images
        model = method.global_model
        records = [content.array_records.values() for content in contents.values()]
        sent = max(sum(len(array.data) for record in message for array in record.values()) for message in records)
        weights = 0 if model is None else sum(t.numel() * t.element_size() for t in model.state_dict().values())
        public = 0 if images is None else len(images) * 2**16
        # 4 bytes an entry; a site may collect images during a run until it has twice as many
        stated = self._connected.images
        images_of = stated | capped_images(stated, method.guard.largest_share)
        projections = 2 * int(max(images_of.values(), default=0)) * 4 * method.sizes.get(PROJECTION, 0)
        return 2**28 + 4 * sent + 4 * weights + public + projections


def make_server_app(recipe_file: Path) -> ServerApp:
    """Return the ServerApp of a deployment, which starts the run's folder or continues it."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        recipe = load_recipe(recipe_file, trust=True)
        path = expand_home(str(context.run_config.get("output") or default_folder(recipe.name, recipe.seed)))
        federation = private_federation(build_federation(recipe))
        with ExitStack() as stack:
            progress = stack.enter_context(ProgressBars(Console(width=160)))
            connected = None
            if not path.exists():  # a run that no site takes part in leaves no folder
                connected = _connect(grid, federation, progress, secrets.token_hex(8))
                RunDirectory.create(path, first_files(federation) | _files_of_sites(federation, connected))
            stack.enter_context(alone_in(path))
            directory = RunDirectory.open(path)
            directory.finish_replacing()
            directory.require_unchanged(but=["recipe.yaml"])  # it is compared with the app's instead
            _require_same_recipe(directory, federation.recipe)
            if directory.checkpoint.finished:
                progress.inform(f"{path} is finished already")
                return
            require_same_data(path, federation.data_digests())
            directory.replace_files({"recipe.yaml": federation.recipe.to_yaml()})
            directory.roll_back()
            run = (path / SITES_RUN).read_text(encoding="utf-8").strip()
            connected = connected or _connect(grid, federation, progress, run)
            run_rounds(federation, directory, progress, FlowerClients(connected, federation, directory, progress))
            progress.inform(f"Next: fedssl report {quoted(path)}")

    return app


def _connect(grid: Grid, federation: Federation, progress: Observer, run: str) -> ConnectedClients:
    """Wait for the sites before a run's rounds, and tell who is there."""
    clients, seconds = len(federation.client_rows), federation.recipe.flower.connect_seconds
    progress.inform(f"waits up to {seconds:g} s for {clients} sites to connect and to approve the app")
    read_manifest(manifest_of_run())  # one that is missing or wrong is told before anyone is asked
    connected = ConnectedClients(Messenger(grid), lambda: bound_clients(grid), federation, progress, run)
    connected.require_enough()
    counts = {k: connected.images.get(k, "an unknown number of") for k in sorted(connected.nodes)}
    progress.inform(f"connected: {', '.join(f'client {k} with {count} images' for k, count in counts.items())}")
    return connected


def _files_of_sites(federation: Federation, connected: ConnectedClients) -> dict[str, str]:
    """Return the files of a new run that depend on its sites: its name there, and how many images each states."""
    files = {SITES_RUN: connected.run}
    if federation.recipe.partition.name == "sites" and connected.images:
        counts = [(k, connected.images.get(k, 0)) for k in range(len(federation.client_rows))]
        files["partition.csv"] = csv_text([("client", "images"), *counts])
    return files


def _require_same_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """Raise UserError where a run that continues has another recipe than before, in more than `_CHANGEABLE`."""
    for key, (stored, given) in differences(load_stored_recipe(directory, resuming=True), recipe).items():
        if key not in _CHANGEABLE:
            raise UserError(
                f"{directory.path} holds a run of another recipe: {key} is {shortened(stored)} in that run, but "
                f"{shortened(given)} in this app's recipe. Only {', '.join(_CHANGEABLE)} may change when a run "
                "continues: name another folder (fedssl app --output), or write the app with the run's recipe"
            )
