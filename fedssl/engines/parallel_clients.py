"""Several clients at a time, each in a worker process of this machine (`clients_parallel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import UserError
from ..federation import Federation
from ..messages import Message
from ..run_directory import RunDirectory
from .client_states import ClientStates
from .client_worker import SPECTRUM, ClientWorker, Evaluation, Task, Training
from .packed_message import pack, unpack
from .progress import Progress


class ParallelClients:
    """Clients in worker processes; a context manager, whose workers have ended when its body has.

    A worker takes one client after another, whichever is next. It gets the client's state and the server's message, and
    gives back the answer and the next state: only this process reads and writes the run's folder. Answers are put in
    the order of the clients before anything reads them, so that a run is the same whoever is ready first.

    The workers are processes with a pipe each, and no pool of concurrent.futures, which would not tell on which client
    the worker was that ended.
    """

    def __init__(self, federation: Federation, directory: RunDirectory, progress: Progress):
        self._federation, self._progress = federation, progress
        self._states = ClientStates(directory, federation.recipe.client_states)
        self._workers: dict[Connection, ClientWorker] = {}

    def __enter__(self) -> ParallelClients:
        recipe = self._federation.recipe
        at_most = recipe.partition.clients if self._federation.method.personal else recipe.clients_per_round
        count = min(recipe.clients_parallel, at_most or recipe.partition.clients)
        threads = max(1, torch.get_num_threads() // count)
        try:
            for _ in range(count):
                worker = ClientWorker(self._federation, threads)
                self._workers[worker.connection] = worker
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            worker.process.terminate()  # it is idle, or works on a client whose round is not committed
        for worker in self._workers.values():
            worker.process.join()

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
            yield k, metrics, unpack(spectrum).tensors[SPECTRUM]

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
                self._workers[connection].give(task(k))
            first_failed = min(failed, key=place.__getitem__, default=None)
            if first_failed is not None and all(place[k] > place[first_failed] for k in busy.values()):
                raise failed[first_failed]
            if not busy:
                return
            for connection in cast(list[Connection], wait(list(busy))):
                kind, content = self._workers[connection].take(busy[connection])
                k = busy.pop(connection)
                free.append(connection)
                if kind == "error":
                    failed[k] = UserError(content)
                elif kind == "bug":
                    failed[k] = RuntimeError(f"client {k}: {content}")
                else:
                    yield k, content
