"""The server's side of the Flower engine: the clients behind Flower's messages, and the ServerApp of a deployment.

A message to a client holds the record `task` and, in a round, the method's message (wire.py):

    query     which client are you?                 run, version
    train     a round, 0 the opening one            round, the client's last committed round, whether to evaluate
    evaluate  its own model                         round, the client's last committed round

The answer's record `answer` names the client and the round; to a query `data` tells what its images look like
(data_form.py). An answer with a record `failure` holds one line instead of a result.
A client keeps its state on its own disk (site_states.py) under the round's number; the server says from which round on
it counts, so that a round that was refused, late or lost with the server is trained again from the same state.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from torch import Tensor

from ...aggregators.base import PROJECTION
from ...errors import UserError
from ...federation import Federation, build_federation
from ...messages import Message
from ...recipe.overrides import flatten_keys
from ...recipe.reading import load_recipe, load_stored_recipe
from ...recipe.recipe import Recipe
from ...run.creation import alone_in, default_folder
from ...run.directory import SITES_RUN, RunDirectory
from ..observers import Observer
from ..progress import ProgressBars
from ..rounds import evaluation_due, first_files, run_rounds
from .messenger import Messenger, config_of, one_line
from .privacy import private_federation
from .privacy_accountant import PrivacyAccountant
from .registration import ConnectedClients
from .secure_aggregation import secure_mean
from .site import OwnEvaluation, evaluation_fault, split_evaluation
from .wire import flatten_weights, from_records, on_disk, to_shared_records, unflatten_weights

#: bytes of the largest answer: so many of any, four times what was sent and the model's, so many a public image, and a
#: projection of each of a client's images, which may become twice as many
_LARGEST_ANSWER = 2**28
_LARGEST_REPRESENTATION = 2**16
#: bytes of the largest answer that holds an evaluation alone
_LARGEST_EVALUATION = 2**22
#: what may change when a run continues: no earlier round depends on it
_CHANGEABLE = ("flower.round_seconds", "flower.connect_seconds", "flower.epsilon_budget", "guard.minimum_answers")

Content = TypeVar("Content")


class FlowerClients:
    """Clients behind Flower's grid (see `fedssl.engines.rounds.Clients`)."""

    def __init__(
        self,
        grid: Grid,
        federation: Federation,
        directory: RunDirectory,
        progress: Observer,
        run: str,
        stop: threading.Event,
    ):
        """Make the clients of a run; call `connect` before its rounds.

        Args:
            grid: Flower's, to reach the nodes.
            federation, directory, progress: the run's.
            run: the run's name at the sites.
            stop: when it is set, waiting ends with `Stopped`.
        """
        self._federation, self._directory, self._progress, self._run = federation, directory, progress, run
        self._messenger = Messenger(grid, stop)
        self._connected = ConnectedClients(self._messenger, federation, progress, run)
        self._options = federation.recipe.flower
        self._accountant = PrivacyAccountant.of_run(directory, self._options)
        self._evaluations: dict[int, OwnEvaluation] = {}  # those that the answers of the round held

    def connect(self) -> None:
        """Wait for all clients; see `ConnectedClients.require_enough` for what is raised."""
        self._connected.require_enough()

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        self._connected.wait_for(set(sent))
        evaluate = self._federation.method.personal and evaluation_due(self._federation.recipe, number)
        contents = to_shared_records({k: message for k, message in sent.items() if k in self._connected.nodes})
        for k, content in contents.items():
            content["task"] = self._task(k, number, evaluate=evaluate)
        unreached = {k: "it is not connected" for k in sent if k not in contents}
        if self._accountant is not None:
            self._accountant.begin(number, contents)
        if self._options.secure_aggregation is None:
            replies, missing = self._plain_answers(number, contents)
        else:
            replies, missing = self._secure_answers(number, sent, contents)
        if self._accountant is not None:
            self._accountant.keep_only(number, replies)
        for k in replies:
            self._directory.adopt_client(k, number)
        return replies, dict(sorted((missing | unreached).items()))

    def _plain_answers(self, number: int, contents: dict[int, RecordDict]) -> tuple[dict[int, Message], dict[int, str]]:
        received, missing = self._exchange("train", contents, number, self._read_answer)
        self._evaluations = {k: evaluation for k, (_, evaluation) in received.items()}
        return {k: received[k][0] for k in sorted(received)}, missing

    def _read_answer(self, records: RecordDict) -> tuple[Message, OwnEvaluation]:
        reply, evaluation = split_evaluation(from_records(records))
        return self.kept(reply), evaluation

    def _secure_answers(
        self, number: int, sent: dict[int, Message], contents: dict[int, RecordDict]
    ) -> tuple[dict[int, Message], dict[int, str]]:
        """The clients' mean, as the answer of each that is in it: an average over these is that mean again."""
        if not contents:
            return {}, {}
        model = self._federation.method.global_model
        assert model is not None
        names = self._federation.method.schedule.travelling(model, self._federation.method.plan(model, number))
        before = {name: sent[min(contents)].tensors[name] for name in names}
        result = secure_mean(
            self._options,
            contents,
            self._connected.nodes,
            flatten_weights(before).size,
            number,
            lambda stage_contents: self._exchange("train", stage_contents, number, lambda records: records),
        )
        if result.mean is None:
            return {}, result.missing
        mean = unflatten_weights(result.mean, before)
        for name in mean:
            if name.endswith(".running_var"):
                mean[name] = mean[name].clamp(min=0)  # rounding may have made a variance negative
        replies = {k: Message(mean, {"samples": 1}, metrics=metrics) for k, metrics in result.metrics.items()}
        return replies, result.missing

    def discard(self, index: int) -> None:
        self._directory.discard_client(index)
        self._evaluations.pop(index, None)
        if self._accountant is not None:
            self._accountant.discard(index)

    def kept(self, reply: Message) -> Message:
        return on_disk(reply, self._directory.path)

    def images(self) -> dict[int, int]:
        return self._connected.images

    def epsilons(self) -> dict[int, float]:
        accountant = self._accountant
        return (
            {} if accountant is None else {k: accountant.epsilon(k) for k in range(len(self._federation.client_rows))}
        )

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        evaluations = {k: evaluation for k, evaluation in self._evaluations.items() if evaluation.spectrum is not None}
        self._evaluations = {}
        everyone = range(len(self._federation.client_rows))
        contents = {
            k: RecordDict({"task": self._task(k, number, evaluate=True)})
            for k in everyone
            if k not in evaluations and k in self._connected.nodes
        }

        def read(records: RecordDict) -> OwnEvaluation:
            return split_evaluation(from_records(records))[1]

        received, missing = self._exchange("evaluate", contents, number, read, _LARGEST_EVALUATION)
        evaluations |= received
        for k in everyone:
            fault = evaluation_fault(evaluations[k]) if k in evaluations else missing.get(k, "it is not connected")
            if fault:
                self._progress.warn(f"round {number}: client {k} is not evaluated: {fault}")
                continue
            spectrum = evaluations[k].spectrum
            assert spectrum is not None
            yield k, evaluations[k].measures, spectrum

    def _task(self, client: int, number: int, evaluate: bool) -> ConfigRecord:
        start = self._directory.client_round(client)
        return ConfigRecord(
            {
                "run": self._run,
                "client": client,
                "round": number,
                "start": -1 if start is None else start,
                "evaluate": evaluate,
                "seconds": self._options.round_seconds,
            }
        )

    def _exchange(
        self,
        kind: str,
        contents: dict[int, RecordDict],
        number: int,
        read: Callable[[RecordDict], Content],
        largest: int | None = None,
    ) -> tuple[dict[int, Content], dict[int, str]]:
        """Send to clients: what `read` makes of each answer as it arrives, and why the others do not count.

        Args:
            kind: of the messages, train or evaluate.
            contents: the messages by client.
            number: the round.
            read: reads an answer's records; a UserError of it says why the answer does not count.
            largest: bytes that an answer may have; where that is not given, those of a round's answer.
        """
        if not contents:
            return {}, {}
        seconds = self._options.round_seconds
        if largest is None:
            largest = self._largest_answer + 4 * max(_num_bytes(content) for content in contents.values())
        client_of = {self._connected.nodes[k]: k for k in contents}
        node_contents = {node: contents[k] for node, k in client_of.items()}
        waiting = self._messenger.send(kind, node_contents, number, seconds)
        received: dict[int, Content] = {}
        reached = {client_of[node] for node in waiting.values()}
        missing = {k: "the round's message could not be sent to it" for k in contents if k not in reached}
        for answer in self._messenger.collect(waiting, seconds, largest):
            k = client_of[answer.node]
            if answer.content is None:
                missing[k] = answer.failure or "its answer is empty"
            elif fault := _address_fault(answer.content, k, number):
                missing[k] = fault
            else:
                try:
                    received[k] = read(answer.content)
                except UserError as error:
                    missing[k] = one_line(str(error))
                    continue
                self._progress.client_began(number, k, len(received), len(contents))
        missing |= {client_of[node]: f"no answer within {seconds:g} s" for node in waiting.values()}
        return received, missing

    @property
    def _largest_answer(self) -> int:
        """Bytes that an answer may have beside what was sent; far more than any recipe's, far less than a memory."""
        method, images = self._federation.method, self._federation.dataset.public_images
        model = method.global_model
        weights = 0 if model is None else sum(t.numel() * t.element_size() for t in model.state_dict().values())
        public = 0 if images is None else len(images) * _LARGEST_REPRESENTATION
        projections = 2 * max(self._connected.images.values(), default=0) * 4 * method.sizes.get(PROJECTION, 0)
        return _LARGEST_ANSWER + 4 * weights + public + projections


def _address_fault(content: RecordDict, client: int, number: int) -> str | None:
    """Why an answer is not that of a client to a round; None where it is."""
    address = config_of(content, "answer")
    if address == {"client": client, "round": number}:
        return None
    got = ", ".join(f"{name} {str(address.get(name))[:20]}" for name in ("client", "round"))
    return f"its answer belongs to another round or client: expected client {client}, round {number}, got {got}"


def _num_bytes(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def make_server_app(recipe_file: Path) -> ServerApp:
    """The ServerApp of a deployment: starts the run's folder, or continues it where it stands."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        recipe = load_recipe(recipe_file)
        path = Path(str(context.run_config.get("output") or default_folder(recipe.name, recipe.seed)))
        federation = private_federation(build_federation(recipe))
        if path.exists():
            RunDirectory.open(path)  # refuses what is no run's folder
        else:
            RunDirectory.create(path, first_files(federation) | {SITES_RUN: secrets.token_hex(8)})
        with alone_in(path), ProgressBars(Console(width=160)) as progress:
            directory = RunDirectory.open(path)
            directory.require_unchanged(but=["recipe.yaml"])  # it is compared with the app's instead
            _update_stored_recipe(directory, recipe)
            directory.roll_back()
            if directory.checkpoint.finished:
                progress.note(f"{path} is finished already")
                return
            run = (path / SITES_RUN).read_text(encoding="utf-8").strip()
            clients = FlowerClients(grid, federation, directory, progress, run, threading.Event())
            clients.connect()
            run_rounds(federation, directory, progress, clients)

    return app


def _update_stored_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """Let a run continue with a recipe that differs from the stored one in `_CHANGEABLE` alone, and store it.

    Raises:
        UserError: it differs in something that earlier rounds depend on.
    """
    stored = flatten_keys(load_stored_recipe(directory, resuming=True).model_dump(mode="json"))
    given = flatten_keys(recipe.model_dump(mode="json"))
    changed = [key for key in stored | given if stored.get(key) != given.get(key)]
    refused = [key for key in changed if key not in _CHANGEABLE]
    if refused:
        key = refused[0]
        raise UserError(
            f"{directory.path} holds a run of another recipe: {key} is {stored.get(key)!r} in that run, but "
            f"{given.get(key)!r} in this app's recipe. Only {', '.join(_CHANGEABLE)} may change when a run continues: "
            "name another folder (fedssl app --output), or write the app with the run's recipe"
        )
    directory.store_recipe(recipe.to_yaml())
