"""A worker process of this machine that trains and evaluates clients, one after another."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from ..data.datasets import Dataset
from ..data_parallel.share import Share, join
from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..reading import parse_recipe
from .client_trainer import ClientTrainer
from .packed_message import PackedMessage, pack, unpack
from .worker_processes import end_with_parent, interrupts_ignored


class Training(NamedTuple):
    """A client's part in a round."""

    client: int
    round: int
    state: PackedMessage
    received: PackedMessage


class Evaluation(NamedTuple):
    """The evaluation of a client's own model after a round."""

    client: int
    round: int
    state: PackedMessage


Task = Training | Evaluation

#: in the message of an evaluation's result
SPECTRUM = "spectrum"
_PRELOADED = ["fedssl.engines.client_worker", "torch._dynamo"]  # the first optimiser imports the second


class Team(NamedTuple):
    """A worker's place among those that train one client together."""

    share: Share
    meeting_point: Path
    device_type: str


class ClientWorker:
    """The worker process, seen from the process that starts it. It holds no state of a client.

    The data set is moved into shared memory, which the worker maps: it is in memory once. Images in a file are read
    from the one that this process has open.

    Args:
        federation: of the run; the worker makes its own of the same recipe and images.
        threads: torch's in the worker.
        team: its place among the workers that train each client together; None where each trains clients of its own.

    Raises:
        UserError: the images do not fit into shared memory.
    """

    def __init__(self, federation: Federation, threads: int, team: Team | None = None):
        self._team = team
        context = _process_context()
        self.connection, theirs = context.Pipe()
        data = federation.dataset, dict(federation.downstream)
        self.process = context.Process(target=_work, args=(theirs, threads, federation.recipe.to_yaml(), *data, team))
        try:
            with interrupts_ignored():  # a spawned worker ignores them before it has imported anything
                self.process.start()
        except RuntimeError as error:
            raise UserError(
                f"the images cannot be put into the memory that processes share ({error}): enlarge it (in a container "
                f"with --shm-size), or set {'training.processes' if team else 'clients_parallel'}=1"
            ) from error
        theirs.close()

    def give(self, task: Task) -> None:
        try:
            self.connection.send(task)
        except OSError as error:
            raise self.lost(task.client) from error

    def take(self, client: int) -> tuple[str, Any]:
        """What the worker sends: `("done", result)`, `("error", message)` or `("bug", traceback)`; it is waited for.

        Raises:
            UserError: the process has ended; the message names the client on which it was.
        """
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.lost(client) from error
        return kind, content

    def lost(self, client: int) -> UserError:
        """The error of a worker process that ended while it worked on a client."""
        self.process.join(timeout=10)  # seconds; it has closed its pipe, so that it has ended or is about to
        code = self.process.exitcode or 0
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        fewer = "" if self._team else ", if need be with fewer clients at a time (clients_parallel=1 behind it)"
        cause = (
            f"most likely the memory ran out. Free some memory and continue with fedssl run --resume RUN{fewer}"
            if code < 0
            else "its error is above. A script that calls fedssl.run must do so below `if __name__ == '__main__':`"
        )
        return UserError(f"the worker process of client {client} {ended}: {cause}")


def _process_context() -> Any:
    """Forks of a server that has imported everything, where the system has them: they start at once and share memory.

    The server runs no other code, and so no threads that a fork would lack.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with interrupts_ignored():
        forkserver.ensure_running()
    return context


def _work(
    connection: Connection,
    threads: int,
    recipe_text: str,
    dataset: Dataset,
    downstream: dict[str, Dataset],
    team: Team | None,
) -> None:
    """A worker process. It receives tasks until its parent ends it, and answers each as `ClientWorker.take` says.

    Of a team the first worker alone answers with a result.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(threads)
    if team:
        join(*team)
    trainer: ClientTrainer | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        while True:
            task = connection.recv()
            try:
                if trainer is None:
                    trainer = ClientTrainer(_federation(recipe_text, dataset, downstream))
                result = _result(trainer, task)
                outcome = "done", result if team is None or team.share.rank == 0 else None
            except UserError as error:
                outcome = "error", str(error)
            except Exception:
                outcome = "bug", traceback.format_exc()
            connection.send(outcome)


def _federation(recipe_text: str, dataset: Dataset, downstream: dict[str, Dataset]) -> Federation:
    """The parent's federation, of its data. The recipe is text, because a part of one's own cannot be pickled."""
    recipe = parse_recipe(yaml.safe_load(recipe_text))
    evaluation = recipe.evaluation.model_copy(update={"downstream": None})
    federation = build_federation(recipe.model_copy(update={"evaluation": evaluation}), dataset)
    return dataclasses.replace(federation, downstream=downstream)


def _result(trainer: ClientTrainer, task: Task) -> Any:
    if isinstance(task, Training):
        answer = trainer.train(task.client, unpack(task.state), unpack(task.received), task.round)
        return tuple(pack(message) for message in answer)
    metrics, spectrum = trainer.evaluate(task.client, unpack(task.state), task.round)
    return metrics, pack(Message({SPECTRUM: spectrum}))
