"""The ClientApp, which trains and evaluates one client at its site; server.py describes the messages.

A site says in its log what it received, trained and sent, and why it takes no part.
"""

import errno
import functools
import secrets
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

from fedkernels import __version__

from ...errors import SendableError, UserError, memory_sentence
from ...federation import Federation
from ...messages import Message
from ...recipe.reading import load_recipe
from ...recipe.recipe import FlowerOptions
from ...untrusted import listed, printable
from ..rounds import evaluate_after
from .messenger import MOST_REASONS, config_of, one_line
from .privacy import private_answer
from .registration import DataForm, counts_are_private
from .site import SiteStates, site_federation
from .site_files import load_site
from .wire import add_evaluation, from_records, to_records

#: what tensors are, by the first part of their names
_KINDS = {
    "online": "weights",
    "representation": "representations of the public images",
    "evaluation": "singular values of its evaluation",
}


@dataclass(frozen=True)
class Site:
    """A client at its site.

    Attributes:
        federation: as the site sees it.
        client: the number that the server has registered its key for.
        states: the client's states by the run's name.
        log: takes a line for the site's log.
    """

    federation: Federation
    client: int
    states: Callable[[str], SiteStates]
    log: Callable[[str], None]


def make_client_app(recipe_file: Path, simulated: Callable[[int], Site] | None = None) -> ClientApp:
    """Return the ClientApp. A node's config names the site's file as `site`.

    In a simulation `simulated` returns a client's site, and `recipe_file` is that of the run's folder.
    """
    app = ClientApp()
    log = (lambda text: None) if simulated else _print_line

    def answer(work: Callable[..., RecordDict], message: FlowerMessage, context: Context) -> FlowerMessage:
        task: Any = message.content["task"]

        def do_work() -> RecordDict:
            k = task["client"]
            site = simulated(k) if simulated else _site_from_file(recipe_file, context.node_config, k)
            return work(site, task, message.content)

        try:
            with _time_limit(float(task.get("seconds", 0.0))):
                options = load_recipe(recipe_file, trust=True).flower if work is _train else FlowerOptions()
                if options.secure_aggregation is None and options.differential_privacy is None:
                    content = do_work()
                else:
                    content = private_answer(options, message, context, do_work)
            if work is not _register:
                log(f"sends {_contents(content)}")
        except Exception as error:  # Flower would send its text
            if simulated and not isinstance(error, UserError):
                raise
            # a simulated site is the server's own
            reason = str(error) if simulated else _failure_reason(error, _occasion(task), log)
            content = RecordDict({"failure": ConfigRecord({"reason": reason})})
        return FlowerMessage(content, reply_to=message)

    app.query()(functools.partial(answer, _register))
    app.train()(functools.partial(answer, _train))
    app.evaluate()(functools.partial(answer, _evaluate))
    return app


def _site_from_file(recipe_file: Path, node_config: Mapping[str, Any], client: int) -> Site:
    path = node_config.get("site")
    if not path:
        raise UserError(
            "the node's config names no site file: start the node with fedssl supernode SITE.yaml, or with "
            "--node-config 'site=\"/path/site.yaml\"'"
        )
    options = load_site(str(path))
    federation = site_federation(load_recipe(recipe_file, trust=True), options, client)
    return Site(federation, client, functools.partial(SiteStates.of_run, options, client), _print_line)


def _register(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    if task["version"] != __version__:
        problem = f"it runs fedssl {__version__}, but the server runs fedssl {task['version']}"
        raise SendableError(f"{problem}: install the same version everywhere")
    form = DataForm.of(site.federation)
    if fault := form.misfit(DataForm(**config_of(content, "expected"))):
        raise SendableError(fault)
    shape = " x ".join(map(str, form.shape))
    count = len(site.federation.client_rows[site.client])
    private = counts_are_private(site.federation.recipe.flower)
    told = "no number" if private else "their number"
    site.log(f"joins run {task['run']} as client {site.client}: its {count:,} images of {shape} fit; sends {told}")
    return RecordDict({"answer": ConfigRecord({"images": 0 if private else count})})


def _train(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    number, start = _round_of(task)
    states, received = site.states(task["run"]), from_records(content)
    for reason in task["left_out"][:MOST_REASONS]:
        site.log(f"was left out of {one_line(reason)}")
    site.log(f"begins {_occasion(task)} of {site.federation.recipe.rounds}; received {received.num_bytes / 1e6:.2f} MB")
    states.require_same_data(site.federation, start)
    client = site.federation.client(site.client, states.load(start))
    reply = site.federation.method.client_round(client, received, number)
    if "loss" in reply.metrics:
        count = len(site.federation.client_rows[site.client])
        site.log(f"trained {_occasion(task)} on {count:,} images: loss {reply.metrics['loss']:.4g}")
    state = site.federation.client_state(client, number)
    states.store(number, state, task.get("kept", []))
    return _to_records(reply, site, number, state if task["evaluate"] else None)


def _evaluate(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    number, start = _round_of(task)
    states = site.states(task["run"])
    states.require_same_data(site.federation, start)
    return _to_records(Message(), site, number, states.load(start))


def _round_of(task: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the task's round and the one whose state it starts from; None where the client has not taken part yet."""
    return int(task["round"]), int(task["start"]) if task["start"] >= 0 else None


def _to_records(reply: Message, site: Site, number: int, evaluated: Message | None) -> RecordDict:
    """Return the records of a reply, with an evaluation of the client's model in the state `evaluated` if given."""
    if evaluated is not None:
        model = site.federation.client(site.client, evaluated).model
        add_evaluation(reply, *evaluate_after(site.federation, model, number))
    return to_records(reply)


def _failure_reason(error: Exception, occasion: str, log: Callable[[str], None]) -> str:
    """Return the line that the server gets about an exception on an occasion, and log the whole of it at the site.

    An exception's text can hold a path that names a patient, a class that is a missing key, a value that pydantic
    refuses. So a text leaves the site only where its type says that it may (`SendableError`). Of all others the server
    gets a kind and a number, and the site's own log has the text under that number.
    """
    if isinstance(error, SendableError):
        log(f"takes no part in {occasion}: {error}")
        return str(error)
    number = secrets.token_hex(4)
    lines = [str(error)] if isinstance(error, UserError) else "".join(traceback.format_exception(error)).splitlines()
    for line in lines:
        log(f"takes no part in {occasion}, failure {number}: {line}")
    return f"{_kind(error)}; its own log has the reason as failure {number}"


def _kind(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, UserError) else error  # such as a full disk
    if cause and memory_sentence(cause):
        return "it ran out of memory"
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on its disk"
    if isinstance(error, UserError):
        return "its data, settings or state cannot be used"
    if isinstance(error, OSError):
        return "a file of it cannot be read or written"
    return f"its code failed with {type(error).__name__}"


def _print_line(text: str) -> None:
    with suppress(OSError, UnicodeError):  # a log on a full disk: the site takes part without it
        print(f"fedssl: this site {printable(text)}", flush=True)  # a server's text is from outside


def _occasion(task: Mapping[str, Any]) -> str:
    return f"round {task['round']}" if "round" in task else f"run {task['run']}"


def _contents(content: RecordDict) -> str:
    """Return what an answer holds, in plain words and with its bytes, as it leaves the site."""
    names = config_of(content, "layout").get("names", [])
    kinds = dict.fromkeys(_KINDS.get(kind := name.partition(".")[0], kind.replace("_", " ")) for name in names)
    parts = [*kinds]
    if RECORD_KEY_CONFIGS in content:
        parts.append("keys, or weights that are masked by them, of the secure aggregation")
    values = [name for record in content.metric_records.values() for name in record]
    if values:
        parts.append(f"the numbers {listed(values, most=20)}")
    pieces = [array.data for record in content.array_records.values() for array in record.values()]
    for value in content.config_records.get(RECORD_KEY_CONFIGS, {}).values():
        pieces += [piece for piece in (value if isinstance(value, list) else [value]) if isinstance(piece, bytes)]
    count = sum(map(len, pieces)) + 8 * len(values)
    return f"{count / 1e6:.2f} MB: {'; '.join(parts) or 'no result'}"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Stop work that the server no longer waits for: a node does one thing at a time and would stay busy."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop_work(number: int, frame: FrameType | None) -> None:
        raise SendableError(f"its work was stopped after {seconds:g} s, the round's deadline (flower.round_seconds)")

    before = signal.signal(signal.SIGALRM, stop_work)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
