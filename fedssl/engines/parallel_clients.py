"""Several clients at a time, each in a worker process of this machine (`clients_parallel`)."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

import torch
import yaml
from torch import Tensor

from ..data.datasets import Dataset
from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..reading import parse_recipe
from ..run_directory import RunDirectory
from .client_states import ClientStates
from .client_trainer import ClientTrainer
from .packed_message import PackedMessage, pack, unpack
from .progress import Progress
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


class ParallelClients:
    """Clients in worker processes; a context manager, whose workers have ended when its body has.

    A worker takes one client after another, whichever is next. It gets the client's state and the server's message, and
    gives back the answer and the next state: only this process reads and writes the run's folder. Answers are put in
    the order of the clients before anything reads them, so that a run is the same whoever is ready first.

    The data set is moved into shared memory, which the workers map: it is in memory once. Images in a file are read
    from the one that this process has open.

    The workers are processes with a pipe each, and no pool of concurrent.futures, which would not tell on which client
    the worker was that ended.
    """

    def __init__(self, federation: Federation, directory: RunDirectory, progress: Progress):
        self._federation, self._progress = federation, progress
        self._states = ClientStates(directory, federation.recipe.client_states)
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> ParallelClients:
        recipe = self._federation.recipe
        at_most = recipe.partition.clients if self._federation.method.personal else recipe.clients_per_round
        count = min(recipe.clients_parallel, at_most or recipe.partition.clients)
        threads = max(1, torch.get_num_threads() // count)
        try:
            for _ in range(count):
                self._start_worker(threads)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            worker.terminate()  # it is idle, or works on a client whose round is not committed
        for worker in self._workers.values():
            worker.join()

    def _start_worker(self, threads: int) -> None:
        federation = self._federation
        context = _process_context()
        ours, theirs = context.Pipe()
        arguments = (theirs, threads, federation.recipe.to_yaml(), federation.dataset, dict(federation.downstream))
        worker = context.Process(target=_work, args=arguments)
        try:
            with interrupts_ignored():  # a spawned worker ignores them before it has imported anything
                worker.start()
        except RuntimeError as error:
            raise UserError(
                f"the images cannot be put into the memory that processes share ({error}): enlarge it (in a container "
                "with --shm-size), or set clients_parallel=1"
            ) from error
        theirs.close()
        self._workers[ours] = worker

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        def task(index: int) -> Training:
            self._progress.client(number, index, len(replies), len(sent))
            return Training(index, number, pack(self._states.load(index)), pack(sent[index]))

        replies: dict[int, Message] = {}
        for k, (reply, state) in self._results(sent, task):
            replies[k] = unpack(reply)
            self._states.store(k, number, unpack(state))
        return {k: replies[k] for k in sent}, {}

    def discard(self, index: int) -> None:
        self._states.discard(index)

    def kept(self, reply: Message) -> Message:
        return reply

    def images(self) -> dict[int, int]:
        return {k: len(rows) for k, rows in enumerate(self._federation.client_rows)}

    def epsilons(self) -> dict[int, float]:
        return {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        clients = range(len(self._federation.client_rows))
        evaluated = dict(self._results(clients, lambda k: Evaluation(k, number, pack(self._states.load(k)))))
        for k in clients:
            metrics, spectrum = evaluated.pop(k)
            yield k, metrics, unpack(spectrum).tensors[_SPECTRUM]

    def _results(self, clients: Iterable[int], task: Callable[[int], Task]) -> Iterator[tuple[int, Any]]:
        """Each client with its task's result, in the order in which the workers are ready.

        A task is made when a worker is free, so that no more states are in memory than there are workers. After an
        error no new task begins; the clients before the one that failed go on, so that the error which is raised is
        that of the first client in order, as where they train one after another.

        Raises:
            UserError: a client's, or a worker process ended.
            RuntimeError: an error in a worker that is not a UserError, with its traceback.
        """
        waiting = list(clients)
        place = {k: position for position, k in enumerate(waiting)}
        waiting.reverse()
        free, busy = list(self._workers), dict[Connection, int]()
        failed: dict[int, Exception] = {}
        while True:
            while waiting and free and not failed:
                connection, k = free.pop(), waiting.pop()
                busy[connection] = k
                self._give(connection, task(k))
            first_failed = min(failed, key=place.__getitem__, default=None)
            if first_failed is not None and all(place[k] > place[first_failed] for k in busy.values()):
                raise failed[first_failed]
            if not busy:
                return
            for connection in cast(list[Connection], wait(list(busy))):
                kind, content = self._take(connection, busy[connection])
                k = busy.pop(connection)
                free.append(connection)
                if kind == "error":
                    failed[k] = UserError(content)
                elif kind == "bug":
                    failed[k] = RuntimeError(f"client {k}: {content}")
                else:
                    yield k, content

    def _give(self, connection: Connection, task: Task) -> None:
        try:
            connection.send(task)
        except OSError as error:
            raise self._lost(connection, task.client) from error

    def _take(self, connection: Connection, client: int) -> tuple[str, Any]:
        try:
            kind, content = connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost(connection, client) from error
        return kind, content

    def _lost(self, connection: Connection, client: int) -> UserError:
        """The error of a worker process that ended while it worked on a client."""
        worker = self._workers[connection]
        worker.join(timeout=10)  # seconds; it has closed its pipe, so that it has ended or is about to
        code = worker.exitcode or 0
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        cause = (
            "most likely the memory ran out. Free some memory and continue with fedssl run --resume RUN, if need be "
            "with fewer clients at a time (clients_parallel=1 behind it)"
            if code < 0
            else "its error is above. A script that calls fedssl.run must do so below `if __name__ == '__main__':`"
        )
        return UserError(f"the worker process of client {client} {ended}: {cause}")


_SPECTRUM = "spectrum"
_PRELOADED = ["fedssl.engines.parallel_clients", "torch._dynamo"]  # the first optimiser imports the second


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
    connection: Connection, threads: int, recipe_text: str, dataset: Dataset, downstream: dict[str, Dataset]
) -> None:
    """A worker process. It receives tasks until its parent ends it.

    For each it sends `("done", result)`, `("error", message)` of a UserError, or `("bug", traceback)`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(threads)
    trainer: ClientTrainer | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        while True:
            task = connection.recv()
            try:
                if trainer is None:
                    trainer = ClientTrainer(_federation(recipe_text, dataset, downstream))
                outcome = "done", _result(trainer, task)
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
    return metrics, pack(Message({_SPECTRUM: spectrum}))
