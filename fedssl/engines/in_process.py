"""The default engine: the clients one after another, or several at a time in worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..federation import Federation, build_federation
from ..messages import Message
from ..recipe.recipe import Recipe
from ..run_folder.creation import new_run, refuse_existing
from ..run_folder.directory import RunDirectory
from .continuing import continue_run
from .observers import Observer
from .rounds import Clients, ClientTrainer, first_files, run_rounds
from .workers import ClientWorker, Task, pack, started_workers


def run(
    recipe: Recipe,
    path: Path,
    observer: Observer | None = None,
    overwrite: bool = False,
    before: Callable[[Federation], None] = lambda federation: None,
) -> RunDirectory:
    """Run a recipe and return the run's new folder, which is made once the input is checked and `before` was called."""
    refuse_existing(path, overwrite)
    federation = build_federation(recipe)
    before(federation)
    with new_run(path, first_files(federation), overwrite):
        return _run(federation, RunDirectory.open(path), observer or Observer())


def resume(
    path: Path,
    observer: Observer | None = None,
    trust: bool = False,
    overrides: Sequence[str] = (),
    from_round: int | None = None,
) -> RunDirectory:
    """Continue a run from its last complete round, see `continue_run`."""
    return continue_run(path, observer, trust, overrides, from_round, build_federation, _run)


def _run(federation: Federation, directory: RunDirectory, observer: Observer) -> RunDirectory:
    recipe = federation.recipe
    if recipe.clients_parallel == 1:
        return run_rounds(federation, directory, observer, LocalClients(federation, directory, observer))
    at_most = recipe.partition.clients if federation.method.personal else recipe.clients_per_round
    with started_workers(federation, min(recipe.clients_parallel, at_most or recipe.partition.clients)) as started:
        return run_rounds(federation, directory, observer, ParallelClients(federation, directory, observer, started))


#: a model's measures by name, and its spectrum
_Measured = tuple[dict[str, float], Tensor]


class LocalClients(Clients):
    """Clients in this process, one after another."""

    def __init__(self, federation: Federation, directory: RunDirectory, observer: Observer):
        self._federation, self._directory, self._observer = federation, directory, observer
        self._trainer = ClientTrainer(federation)
        self._measured: dict[int, _Measured] = {}  # between rounds; of clients that have not trained since

    def discard(self, index: int) -> None:
        self._directory.discard_client(index)

    def images(self) -> dict[int, int]:
        return {k: len(rows) for k, rows in enumerate(self._federation.client_rows)}

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        replies = {}
        for position, k in enumerate(sent):
            self._observer.client_began(number, k, position, len(sent))
            replies[k], state = self._trainer.train(k, self._directory.client_state(k), sent[k], number)
            self._directory.write_client(k, number, state)
            self._measured.pop(k, None)
        return replies, {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        known = self._known(number)
        for k in range(len(self._federation.client_rows)):
            if k not in known:
                known[k] = self._trainer.evaluate(k, self._directory.client_state(k), number)
            yield k, *known[k]

    def _known(self, number: int) -> dict[int, _Measured]:
        """Return where measures of unchanged models are kept: before and after training more is measured."""
        return self._measured if 0 < number < self._federation.recipe.rounds else {}


class ParallelClients(LocalClients):
    """Clients in worker processes, each of which takes one client after another.

    Only this process reads and writes the run's folder. Answers are put in the order of the clients, so that a run is
    the same whichever is ready first. A pool of concurrent.futures would not say which client an ended worker was on.
    """

    def __init__(
        self, federation: Federation, directory: RunDirectory, observer: Observer, started: Iterable[ClientWorker]
    ):
        super().__init__(federation, directory, observer)
        self._workers: dict[Connection, ClientWorker] = {worker.connection: worker for worker in started}

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        def training(k: int) -> Task:
            self._observer.client_began(number, k, len(replies), len(sent))
            return Task(k, number, pack(self._directory.client_state(k)), pack(sent[k]))

        replies: dict[int, Message] = {}
        for k, (reply, state) in self._results(sent, training):
            replies[k] = reply
            self._directory.write_client(k, number, state)
            self._measured.pop(k, None)
        return {k: replies[k] for k in sent}, {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        clients = range(len(self._federation.client_rows))
        known = self._known(number)
        unknown = [k for k in clients if k not in known]
        known |= self._results(unknown, lambda k: Task(k, number, pack(self._directory.client_state(k))))
        for k in clients:
            yield k, *known[k]

    def _results(self, clients: Iterable[int], task: Callable[[int], Task]) -> Iterator[tuple[int, Any]]:
        """Yield each client with its task's result, in the order in which the workers are ready.

        A task is made when a worker is free, so that no more states are in memory than there are workers. After an
        error (see `ClientWorker.take`) no new task begins; the clients before the one that failed go on, so that the
        error which is raised is that of the first client in order, as if they trained one after another.
        """
        waiting = deque(enumerate(clients))
        free, busy = list(self._workers), dict[Connection, tuple[int, int]]()  # position and client
        failed: dict[int, Exception] = {}  # by position
        while True:
            while waiting and free and not failed:
                connection, (position, k) = free.pop(), waiting.popleft()
                busy[connection] = position, k
                self._workers[connection].give(task(k))
            if failed and all(position > min(failed) for position, _ in busy.values()):
                raise failed[min(failed)]
            if not busy:
                return
            for connection in cast(list[Connection], wait(list(busy))):
                position, k = busy.pop(connection)
                result, error = self._workers[connection].take(k)
                free.append(connection)
                if error is None:
                    yield k, result
                else:
                    failed[position] = error
