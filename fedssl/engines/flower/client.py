"""The ClientApp, which trains and evaluates one client at its site; server.py describes the messages."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedkernels import __version__

from ...errors import UserError
from ...federation import Federation, build_federation
from ...messages import Message
from ...recipe.reading import load_recipe
from ..rounds import evaluate_after
from .privacy import private_answer
from .registration import DataForm
from .site import SiteStates, add_evaluation, site_federation
from .site_options import load_site
from .wire import from_records, to_records


@dataclass(frozen=True)
class Site:
    """A client at its site: the federation as the site sees it, the site's number, and its states by the run's name."""

    federation: Federation
    client: int
    states: Callable[[str], SiteStates]


def make_client_app(recipe_file: Path, simulated: bool = False) -> ClientApp:
    """Return the ClientApp. A node's config names the site's file as `site`; Flower numbers simulated nodes.

    In a simulation `recipe_file` is that of the run's folder, which also keeps the clients' states.
    """
    app = ClientApp()
    make_site = _simulated_site if simulated else _site_from_file

    def answer(work: Callable[..., RecordDict], message: FlowerMessage, context: Context) -> FlowerMessage:
        task: Any = message.content["task"]

        def do_work() -> RecordDict:
            site = make_site(str(recipe_file), tuple(sorted(context.node_config.items())))
            return work(site, task, message.content)

        try:
            with _time_limit(float(task.get("seconds", 0.0))):
                if work is _train:
                    content = private_answer(load_recipe(recipe_file).flower, message, context, do_work)
                else:
                    content = do_work()
        except UserError as error:
            content = RecordDict({"failure": ConfigRecord({"reason": str(error)})})
        return FlowerMessage(content, reply_to=message)

    app.query()(functools.partial(answer, _register))
    app.train()(functools.partial(answer, _train))
    app.evaluate()(functools.partial(answer, _evaluate))
    return app


@functools.lru_cache(maxsize=8)  # of a simulated client's process, which serves several clients and rounds
def _simulated_site(recipe_file: str, node_config: tuple[tuple[str, Any], ...]) -> Site:
    client = int(dict(node_config)["partition-id"])
    states = SiteStates(Path(recipe_file).parent / "checkpoints", client, prune=False)
    return Site(build_federation(load_recipe(recipe_file)), client, lambda run: states)


def _site_from_file(recipe_file: str, node_config: tuple[tuple[str, Any], ...]) -> Site:
    path = dict(node_config).get("site")
    if not path:
        raise UserError(
            "the node's config names no site file: start the node with fedssl supernode SITE.yaml, or with "
            "--node-config 'site=\"/path/site.yaml\"'"
        )
    options = load_site(str(path))
    federation = site_federation(load_recipe(recipe_file), options)
    return Site(federation, options.client, functools.partial(SiteStates.of_run, options))


def _register(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    if task["version"] != __version__:
        problem = f"it runs fedssl {__version__}, but the server runs fedssl {task['version']}"
        raise UserError(f"{problem}: install the same version everywhere")
    answer = ConfigRecord({"client": site.client, "round": 0})
    return RecordDict({"answer": answer, "data": ConfigRecord(DataForm.of(site.federation, site.client).model_dump())})


def _train(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    number, start = _round_of(site, task)
    states, received = site.states(task["run"]), from_records(content)
    states.require_same_data(site.federation, start)
    client = site.federation.client(site.client, states.load(start))
    reply = site.federation.method.client_round(client, received, number)
    state = site.federation.client_state(client, number)
    states.store(number, state, start)
    return _to_answer(reply, site, number, state if task["evaluate"] else None)


def _evaluate(site: Site, task: Mapping[str, Any], content: RecordDict) -> RecordDict:
    number, start = _round_of(site, task)
    states = site.states(task["run"])
    states.require_same_data(site.federation, start)
    return _to_answer(Message(), site, number, states.load(start))


def _round_of(site: Site, task: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the task's round and the one whose state it starts from; None where the client has not taken part yet."""
    if task["client"] != site.client:
        raise UserError(f"it is client {site.client}, but it got a message for client {task['client']}")
    return int(task["round"]), int(task["start"]) if task["start"] >= 0 else None


def _to_answer(reply: Message, site: Site, number: int, evaluated: Message | None) -> RecordDict:
    """Return the records of a reply, with an evaluation of the client's model in the state `evaluated` if given."""
    if evaluated is not None:
        model = site.federation.client(site.client, evaluated).model
        add_evaluation(reply, *evaluate_after(site.federation, model, number))
    return RecordDict({**to_records(reply), "answer": ConfigRecord({"client": site.client, "round": number})})


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Stop work that the server no longer waits for: a node does one thing at a time and would stay busy."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop_work(number: int, frame: FrameType | None) -> None:
        raise UserError(f"its work was stopped after {seconds:g} s, the round's deadline (flower.round_seconds)")

    before = signal.signal(signal.SIGALRM, stop_work)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
