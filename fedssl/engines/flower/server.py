"""The Flower engine: the same method and the same rounds, with the clients behind Flower's messages.

One ServerApp and one ClientApp serve the simulation on Ray (`run`, `resume`) and the deployment, where `fedssl app`
writes the Flower app that `flwr run` takes (flower_app.py).

A message to a client holds the record `task` and, in a round, the method's message (flower_messages.py):

    query     are you there, and as which client?   run, version
    train     a round, 0 the opening one            round, the client's last committed round, whether to evaluate
    evaluate  its own model                         round, the client's last committed round

The answer's record `answer` names the client; to a query `data` tells what its images look like (site.DataForm). An
answer with a record `failure` holds one line instead of a result.
A client keeps its state on its own disk (site.py) under the round's number; the server says from which round on it
counts, so that a round that was refused, late or lost with the server is trained again from the same state.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from google.protobuf.message import DecodeError
from rich.console import Console
from torch import Tensor

from fedkernels import __version__

from ...errors import UserError
from ...federation import Federation, build_federation
from ...guard import is_measure
from ...messages import Message
from ...reading import load_recipe
from ...recipe import Recipe
from ...run_directory import SITES_RUN, RunDirectory, alone_in
from ...storage import write_atomically
from ..progress import Progress, ProgressBars, Silent
from ..rounds import evaluate_after, evaluation_due, first_files, refuse_existing, run_rounds
from .privacy import flatten, private_answer, private_federation, secure_mean, unflatten
from .site import DataForm, SiteOptions, SiteStates, load_site, site_federation
from .wire import TooLarge, answers_below, from_records, to_records

_POLL_SECONDS = (0.1, 2.0)  # first and longest; each look is a request to the SuperLink
_ASK_AGAIN_SECONDS = 30.0
_GREETING_SECONDS = 5.0  # that a round waits for who has just come, where it lacks a client
#: what the SuperLink says in a node's place; a message expires at the round's deadline
_SILENT = {
    ErrorCode.NODE_UNAVAILABLE: "its node has gone",
    ErrorCode.MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "no answer in time",
}
#: bytes of the largest answer: so many of any, four times what was sent and the model's, and so many a public image
_LARGEST_ANSWER = 2**28
_LARGEST_REPRESENTATION = 2**16
_MEASURE = "evaluation/"
_SPECTRUM = "evaluation.spectrum"
#: what may change when a run goes on: no earlier round depends on it
_CHANGEABLE = ("flower.round_seconds", "flower.connect_seconds", "guard.minimum_answers")

# The server's side


class Stopped(BaseException):
    """The simulation was interrupted (Ctrl-C)."""


class FlowerClients:
    """Clients behind Flower's grid (in_process.Clients)."""

    def __init__(
        self,
        grid: Grid,
        federation: Federation,
        directory: RunDirectory,
        progress: Progress,
        run: str,
        stop: threading.Event,
    ):
        self._grid, self._federation, self._directory, self._progress = grid, federation, directory, progress
        self._run, self._stop = run, stop
        self._options = federation.recipe.flower
        self._nodes: dict[int, int] = {}  # by client
        self._asked: dict[str, int] = {}  # nodes that have been asked who they are and not answered yet, by message
        self._ask_at: dict[int, float] = {}  # when to ask a node; asked again only where it could not answer
        self._evaluated: dict[int, Message] = {}  # came with the answers of the round
        self._forms: dict[int, DataForm] = {}  # what the clients' images look like
        self._misfits: dict[int, str] | None = {}  # clients whose data do not fit; None once the run has begun

    def connect(self) -> None:
        """Wait for all clients.

        Raises:
            UserError: when the time is over, fewer than guard.minimum_answers are there, or the data of those that are
                do not fit together.
        """
        everyone = range(len(self._federation.client_rows))
        self._look(set(everyone), self._options.connect_seconds)
        missing = sorted(set(everyone) - self._nodes.keys())
        if len(self._nodes) < self._federation.recipe.guard.minimum_answers:
            raise UserError(
                f"{len(self._nodes)} of {len(everyone)} clients are connected after "
                f"{self._options.connect_seconds:g} s, guard.minimum_answers is "
                f"{self._federation.recipe.guard.minimum_answers}; missing are {missing}"
            )
        if self._misfits:
            reasons = [f"client {k}: {reason}" for k, reason in sorted(self._misfits.items())]
            raise UserError(f"the sites' data do not fit together: {'; '.join(reasons)}")
        self._misfits = None
        for k in missing:
            self._progress.warn(f"client {k} is not connected: the run begins without it")

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        self._look(set(sent), self._patience(set(sent)))
        evaluate = self._federation.method.personal and evaluation_due(self._federation.recipe, number)
        contents = {}
        for k in sent.keys() & self._nodes.keys():
            contents[k] = to_records(sent[k])
            contents[k]["task"] = self._task(k, number, evaluate=evaluate)
        unreached = {k: "it is not connected" for k in sent if k not in contents}
        if self._options.secure_aggregation is not None:
            replies, missing = self._secure_answers(number, sent, contents)
            return replies, dict(sorted((missing | unreached).items()))
        came, missing = self._ask("train", contents, number)
        missing |= unreached
        replies = {}
        self._evaluated = {}
        for k in sorted(came):
            try:
                reply = from_records(came[k])
            except UserError as error:
                missing[k] = _one_line(str(error))
                continue
            replies[k], self._evaluated[k] = _split_evaluation(reply)
            self._directory.adopt_client(k, number)
        return replies, dict(sorted(missing.items()))

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
            self._nodes,
            flatten(before).size,
            number,
            lambda asked: self._ask("train", asked, number),
        )
        replies = {}
        if result.mean is not None:
            mean = unflatten(result.mean, before)
            for k, metrics in result.metrics.items():
                replies[k] = Message(mean, {"samples": 1}, metrics=metrics)
                self._directory.adopt_client(k, number)
        return replies, result.missing

    def discard(self, index: int) -> None:
        self._directory.discard_client(index)
        self._evaluated.pop(index, None)

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        everyone = range(len(self._federation.client_rows))
        found = {k: message for k, message in self._evaluated.items() if message.tensors}
        self._evaluated = {}
        contents = {
            k: RecordDict({"task": self._task(k, number, evaluate=True)})
            for k in everyone
            if k not in found and k in self._nodes
        }
        came, missing = self._ask("evaluate", contents, number)
        for k, records in came.items():
            try:
                _, found[k] = _split_evaluation(from_records(records))
            except UserError as error:
                missing[k] = _one_line(str(error))
        for k in everyone:
            if k in found and (broken := _broken_evaluation(found[k])):
                missing[k] = broken
                del found[k]
            if k in found:
                yield k, found[k].numbers, found[k].tensors[_SPECTRUM]
            else:
                self._progress.warn(f"round {number}: client {k} is not evaluated: {missing.get(k, 'not connected')}")

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

    def _ask(
        self, kind: str, contents: dict[int, RecordDict], number: int
    ) -> tuple[dict[int, RecordDict], dict[int, str]]:
        """What the clients answer until the round's deadline, and why the others do not count."""
        if not contents:
            return {}, {}
        seconds = self._options.round_seconds
        largest = self._largest_answer + 4 * max(_sent_bytes(content) for content in contents.values())
        waiting = self._push(kind, {self._nodes[k]: contents[k] for k in contents}, number, seconds)
        by_node = {self._nodes[k]: k for k in contents}
        came: dict[int, RecordDict] = {}
        missing = {k: "its message could not be sent" for k in contents if self._nodes[k] not in waiting.values()}
        for node, content, failure in self._collect(waiting, time.monotonic() + seconds, largest):
            k = by_node[node]
            if content is None:
                missing[k] = failure or "its answer is empty"
            elif _record(content, "answer") != {"client": k, "round": number}:
                missing[k] = f"its answer is none to round {number} of client {k}"
            else:
                came[k] = content
                self._progress.client(number, k, len(came), len(contents))
        missing |= {by_node[node]: f"no answer within {seconds:g} s" for node in waiting.values()}
        return came, missing

    def _push(self, kind: str, contents: dict[int, RecordDict], number: int, seconds: float) -> dict[str, int]:
        """Send to nodes; the nodes by message id."""
        messages = [
            FlowerMessage(content, dst_node_id=node, message_type=kind, group_id=str(number), ttl=seconds)
            for node, content in contents.items()
        ]
        ids = list(self._grid.push_messages(messages))
        return {name: node for name, node in zip(ids, contents, strict=False) if name}

    def _collect(
        self, waiting: dict[str, int], deadline: float, largest: int
    ) -> Iterator[tuple[int, RecordDict | None, str | None]]:
        """Answers as they come: (node, content, failure). Those that came are taken out of `waiting`."""
        pause, longest = _POLL_SECONDS
        while waiting:
            if self._stop.is_set():
                raise Stopped
            for name, node in list(waiting.items()):
                content, failure = self._pull(name, largest)
                if content is not None or failure is not None:
                    del waiting[name]
                    yield node, content, failure
            if not waiting or time.monotonic() >= deadline:
                return
            time.sleep(pause)
            pause = min(1.3 * pause, longest)

    def _pull(self, name: str, largest: int) -> tuple[RecordDict | None, str | None]:
        """The answer to one message, or why there is none, or neither yet. One at a time: where one cannot be read
        Flower gives up on all that it was asked for."""
        try:
            with answers_below(largest, self._grid):
                replies = list(self._grid.pull_messages([name]))
        except TooLarge as error:
            return None, str(error)
        except (DecodeError, ValueError, TypeError, LookupError, AttributeError) as error:
            return None, f"its answer cannot be read: {_one_line(str(error))}"
        if not replies:
            return None, None
        reply = replies[0]
        if reply.has_error():
            why = _one_line(reply.error.reason or "no reason given")
            return None, _SILENT.get(reply.error.code, f"its app failed: {why}")
        if "failure" in reply.content:
            return None, _one_line(str(_record(reply.content, "failure").get("reason")))
        return reply.content, None

    def _patience(self, wanted: set[int]) -> float:
        """A round goes on without those that left, as long as enough are there."""
        enough = len(wanted & self._nodes.keys()) >= self._federation.recipe.guard.minimum_answers
        return 0.0 if enough else self._options.connect_seconds

    def _ask_new(self) -> None:
        """Ask nodes that have come which client they are. The answer may be looked for after a whole round."""
        here = set(self._grid.get_node_ids())
        self._nodes = {k: node for k, node in self._nodes.items() if node in here}
        self._ask_at = {node: at for node, at in self._ask_at.items() if node in here}
        new = [node for node in here if time.monotonic() >= self._ask_at.get(node, 0.0)]
        if not new:
            return
        question = ConfigRecord({"run": self._run, "version": __version__})
        seconds = self._options.connect_seconds + self._options.round_seconds
        self._asked |= self._push("query", {node: RecordDict({"task": question}) for node in new}, 0, seconds)
        self._ask_at |= dict.fromkeys(new, float("inf"))

    def _look(self, wanted: set[int], seconds: float) -> None:
        """Ask new nodes which client they are, until the wanted ones are there or the time is over."""
        deadline = time.monotonic() + seconds
        pause, longest = _POLL_SECONDS
        while True:
            asked = len(self._ask_at)
            self._ask_new()
            if len(self._ask_at) > asked:
                deadline = max(deadline, time.monotonic() + _GREETING_SECONDS)
            for node, answer, failure in self._collect(self._asked, 0.0, _LARGEST_ANSWER):
                self._introduce(node, answer, failure)
            if wanted <= self._nodes.keys() or time.monotonic() >= deadline:
                return
            time.sleep(pause)
            pause = min(1.3 * pause, longest)

    def _introduce(self, node: int, answer: RecordDict | None, failure: str | None) -> None:
        if answer is not None:
            k = _record(answer, "answer").get("client")
            if not isinstance(k, int) or not 0 <= k < len(self._federation.client_rows):
                failure = f"it says that it is client {k}"
            elif self._nodes.get(k, node) != node:
                failure = f"it says that it is client {k}, which node {self._nodes[k]} is"
            elif (failure := self._look_at_data(k, _record(answer, "data"))) is None:
                self._nodes[k] = node
                return
        self._ask_at[node] = time.monotonic() + _ASK_AGAIN_SECONDS
        self._progress.warn(f"node {node} is left out: {failure}")

    def _look_at_data(self, client: int, record: dict[str, Any]) -> str | None:
        """Why a client is left out for what its images look like.

        Before the run has begun, data that do not fit are noted instead: then the run does not begin (`connect`).
        """
        form = _data_form(record)
        if form is None:
            return "it does not say what its images look like"
        own = self._own_form
        if reason := form.other_shape(own):
            reason = f"it has {reason} as the server has"
        elif form.public != own.public:
            return "its public images are not those of the server: give all sites the same file as data.public_path"
        elif self._federation.recipe.objective.needs_labels:
            if reason := form.other_classes(own):
                reason = f"its classes are not the server's, which the objective trains on: it {reason}"
        elif len(form.classes) > 1:  # with one class there are no labels to speak of
            self._warn_of_classes(client, form)
        if self._misfits is None:
            return reason
        self._misfits.pop(client, None)  # of another try of the site's
        if reason:
            self._misfits[client] = reason
        return None

    def _warn_of_classes(self, client: int, form: DataForm) -> None:
        if client in self._forms:
            return
        if self._forms and (reason := form.other_classes(self._forms[min(self._forms)])):
            self._progress.warn(
                f"client {client}: its classes are not those of client {min(self._forms)}: it {reason}; each is "
                "evaluated on its own, and their figures do not compare"
            )
        self._forms[client] = form

    @functools.cached_property
    def _largest_answer(self) -> int:
        """Bytes that an answer may have beside what was sent; far more than any recipe's, far less than a memory."""
        model, images = self._federation.method.global_model, self._federation.dataset.public_images
        weights = 0 if model is None else sum(t.numel() * t.element_size() for t in model.state_dict().values())
        return _LARGEST_ANSWER + 4 * weights + (0 if images is None else len(images) * _LARGEST_REPRESENTATION)

    @functools.cached_property
    def _own_form(self) -> DataForm:
        return DataForm.of(self._federation)


def _split_evaluation(reply: Message) -> tuple[Message, Message]:
    """A client's answer to the round, and its evaluation where it was asked for."""
    evaluation = Message({}, {n: v for n, v in reply.numbers.items() if n.startswith(_MEASURE)})
    numbers = {n: v for n, v in reply.numbers.items() if n not in evaluation.numbers}
    tensors = dict(reply.tensors)
    if _SPECTRUM in tensors:
        evaluation.tensors[_SPECTRUM] = tensors.pop(_SPECTRUM)
    evaluation.numbers = {n.removeprefix(_MEASURE): v for n, v in evaluation.numbers.items()}
    return Message(tensors, numbers, reply.config, reply.metrics), evaluation


def _broken_evaluation(found: Message) -> str | None:
    spectrum = found.tensors.get(_SPECTRUM)
    if spectrum is None or spectrum.dim() != 1 or not spectrum.is_floating_point() or not spectrum.isfinite().all():
        return "its evaluation came without a spectrum of finite numbers"
    strange = [name for name in found.numbers if not is_measure(name)]
    if strange:
        return f"its evaluation holds {strange[0][:100]!r}, which is no measure of it"
    wrong = [name for name, value in found.numbers.items() if not math.isfinite(value)]
    return f"its evaluation says {wrong[0]} is {found.numbers[wrong[0]]}" if wrong else None


def _data_form(record: dict[str, Any]) -> DataForm | None:
    values: list[Any] = [record.get(name) for name in ("shape", "classes", "public")]
    shape, classes, public = values
    valid = (
        isinstance(shape, list)
        and len(shape) == 3
        and all(isinstance(size, int) for size in shape)
        and isinstance(classes, list)
        and all(isinstance(name, str) for name in classes)
        and isinstance(public, str)
    )
    return DataForm(tuple(shape), tuple(classes), public) if valid else None


def _sent_bytes(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _record(content: RecordDict, name: str) -> dict[str, Any]:
    """A config record as a plain mapping; empty where there is none of that name."""
    record = content.get(name)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def make_server_app(recipe_file: Path) -> ServerApp:
    """The ServerApp of a deployment: starts the run's folder, or continues it where it stands."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        recipe = load_recipe(recipe_file)
        path = Path(str(context.run_config.get("output") or Path("runs") / f"{recipe.name}-seed{recipe.seed}"))
        federation = private_federation(build_federation(recipe))
        if path.exists():
            RunDirectory.open(path)  # refuses what is no run's folder
        else:
            RunDirectory.create(path, first_files(federation) | {SITES_RUN: secrets.token_hex(8)})
        with alone_in(path), ProgressBars(Console(width=160)) as progress:
            directory = RunDirectory.open(path)
            _take_up(path, recipe)
            directory.roll_back()
            if directory.checkpoint.finished:
                progress.note(f"{path} is finished already")
                return
            run = (path / SITES_RUN).read_text(encoding="utf-8").strip()
            clients = FlowerClients(grid, federation, directory, progress, run, threading.Event())
            clients.connect()
            run_rounds(federation, directory, progress, clients)

    return app


def _take_up(path: Path, recipe: Recipe) -> None:
    """Let a run go on with a recipe that may wait otherwise than the stored one, which it then replaces.

    Raises:
        UserError: it differs in something that rounds already done depend on.
    """
    stored = _leaves(load_recipe(path / "recipe.yaml").model_dump(mode="json"))
    given = _leaves(recipe.model_dump(mode="json"))
    changed = [key for key in stored | given if stored.get(key) != given.get(key)]
    refused = [key for key in changed if key not in _CHANGEABLE]
    if refused:
        key = refused[0]
        raise UserError(
            f"{path} holds a run of another recipe: {key} is {stored.get(key)!r} there and {given.get(key)!r} here; "
            f"name another output. Only {', '.join(_CHANGEABLE)} may change when a run goes on"
        )
    if changed:
        write_atomically(path / "recipe.yaml", recipe.to_yaml().encode())


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Values by their keys' path, such as flower.round_seconds; lists are values. An empty mapping has none."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, inner in value.items() for k, v in _leaves(inner, f"{path}.{key}" if path else key).items()}


# The clients' side


def make_client_app(recipe_file: Path, simulated: bool = False) -> ClientApp:
    """The ClientApp. A node's config names the site's file as `site`; a simulated node is given its number by Flower.

    Args:
        recipe_file: the recipe; simulated, it lies in the run's folder, which also keeps the clients' states.
    """
    app = ClientApp()
    describe = _simulated_site if simulated else _described_site

    def handle(work: Callable[[Site, Mapping[str, Any], RecordDict], RecordDict]) -> Callable[..., FlowerMessage]:
        def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
            task: Any = message.content["task"]

            def done() -> RecordDict:
                site = describe(str(recipe_file), tuple(sorted(context.node_config.items())))
                return work(site, task, message.content)

            try:
                with _time_limit(float(task.get("seconds", 0.0))):
                    if work is _train:
                        content = private_answer(load_recipe(recipe_file).flower, message, context, done)
                    else:
                        content = done()
            except UserError as error:
                content = RecordDict({"failure": ConfigRecord({"reason": str(error)})})
            return FlowerMessage(content, reply_to=message)

        return answer

    app.query()(handle(_greet))
    app.train()(handle(_train))
    app.evaluate()(handle(_evaluate))
    return app


class Site:
    """A client at its site, while its process lives."""

    def __init__(self, federation: Federation, client: int, states: Callable[[str], SiteStates]):
        self.federation, self.client, self.states = federation, client, states


@functools.lru_cache(maxsize=8)  # of a simulated client's process, which serves several clients and rounds
def _simulated_site(recipe_file: str, node_config: tuple[tuple[str, Any], ...]) -> Site:
    client = int(dict(node_config)["partition-id"])
    states = SiteStates(Path(recipe_file).parent / "checkpoints", client, prune=False)
    return Site(build_federation(load_recipe(recipe_file)), client, lambda run: states)


def _described_site(recipe_file: str, node_config: tuple[tuple[str, Any], ...]) -> Site:
    path = dict(node_config).get("site")
    if not path:
        raise UserError(
            "the node's config names no site file: start the node with --node-config 'site=\"/path/site.yaml\"'"
        )
    options: SiteOptions = load_site(str(path))
    federation = site_federation(load_recipe(recipe_file), options)
    return Site(federation, options.client, functools.partial(SiteStates.of_run, options))


def _greet(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    if task["version"] != __version__:
        raise UserError(f"it has fedssl {__version__}, the server has {task['version']}: install the same everywhere")
    form = DataForm.of(site.federation)
    data = ConfigRecord({"shape": list(form.shape), "classes": list(form.classes), "public": form.public})
    return RecordDict({"answer": ConfigRecord({"client": site.client, "round": 0}), "data": data})


def _train(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    number, start = _checked(site, task)
    method, states = site.federation.method, site.states(task["run"])
    received = from_records(content)
    client = site.federation.client(site.client, states.load(start))
    reply = method.client_round(client, received, number)
    state = site.federation.client_state(client)
    states.store(number, state, start)
    if task["evaluate"]:
        _add_evaluation(reply, site, state, number)
    return _answer(reply, site, number)


def _evaluate(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    number, start = _checked(site, task)
    reply = Message()
    _add_evaluation(reply, site, site.states(task["run"]).load(start), number)
    return _answer(reply, site, number)


def _add_evaluation(reply: Message, site: Site, state: Message, number: int) -> None:
    model = site.federation.client(site.client, state).model
    measures, spectrum = evaluate_after(site.federation, model, number)
    reply.numbers.update({_MEASURE + name: value for name, value in measures.items()})
    reply.tensors[_SPECTRUM] = spectrum


def _checked(site: Site, task: Mapping[str, Any]) -> tuple[int, int | None]:
    if task["client"] != site.client:
        raise UserError(f"the message is for client {task['client']}, this is client {site.client}")
    return int(task["round"]), int(task["start"]) if task["start"] >= 0 else None


def _answer(reply: Message, site: Site, number: int) -> RecordDict:
    records = to_records(reply)
    records["answer"] = ConfigRecord({"client": site.client, "round": number})
    return records


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End work that the server no longer waits for: a node does one thing at a time and would stay busy with it."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise UserError(f"stopped after {seconds:g} s, the round's deadline")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The simulation on Ray


def run(recipe: Recipe, path: Path, progress: Progress | None = None, overwrite: bool = False) -> RunDirectory:
    """Run a recipe from its start into a new folder, its clients on Ray; see `in_process.run`.

    Raises:
        UserError: see `in_process.run`; the engine is another; Ray is not installed.
    """
    _refuse_deployment(recipe)
    _require_ray()
    refuse_existing(path, overwrite)
    federation = private_federation(build_federation(recipe))
    directory = RunDirectory.create(path, first_files(federation), overwrite)
    with alone_in(path):
        return _simulate(federation, directory, progress or Silent())


def resume(path: Path, progress: Progress | None = None) -> RunDirectory:
    """Continue a run from its last complete round; see `in_process.resume` and, for what is raised, `run`."""
    RunDirectory.open(path)  # refuses what is no run's folder
    recipe = load_recipe(path / "recipe.yaml")
    _refuse_deployment(recipe)
    _require_ray()
    with alone_in(path):
        directory = RunDirectory.open(path)
        directory.roll_back()
        if directory.checkpoint.finished:
            return directory
        return _simulate(private_federation(build_federation(recipe)), directory, progress or Silent())


def _refuse_deployment(recipe: Recipe) -> None:
    if recipe.engine == "flower":
        raise UserError(
            "engine flower runs across machines: write its app with fedssl app RECIPE FOLDER and start it with "
            "flwr run FOLDER (docs/deploy.md), or use engine=flower-simulation on this machine"
        )


def _require_ray() -> None:
    if find_spec("ray") is None:
        raise UserError("engine flower-simulation needs Ray: pip install 'fedkernels-fedssl[flower]'")


def _simulate(federation: Federation, directory: RunDirectory, progress: Progress) -> RunDirectory:
    from flwr.simulation import run_simulation

    ended: list[BaseException | None] = []
    stop = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            clients = FlowerClients(grid, federation, directory, progress, "simulation", stop)
            clients.connect()
            run_rounds(federation, directory, progress, clients)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    client_app = make_client_app((directory.path / "recipe.yaml").absolute(), simulated=True)
    with _interrupts_set(stop), _quiet():
        run_simulation(
            server_app, client_app, len(federation.client_rows), backend_config=_ray_config(federation.recipe)
        )
    if not ended:
        raise RuntimeError("the simulation ended before its server app")
    if isinstance(ended[0], Stopped):
        raise KeyboardInterrupt
    if ended[0] is not None:
        raise ended[0]
    return directory


def _ray_config(recipe: Recipe) -> dict[str, Any]:
    options = recipe.flower
    start: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    if options.cpus is not None:
        start["num_cpus"] = options.cpus
    if options.object_store_megabytes is not None:
        start["object_store_memory"] = options.object_store_megabytes * 2**20
    return {
        "init_args": start,
        "client_resources": {"num_cpus": options.client_cpus, "num_gpus": options.client_gpus},
    }


@contextmanager
def _interrupts_set(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C ends the server app, and with it the simulation; raised in Flower's own wait it would hang there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
