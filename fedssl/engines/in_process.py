"""The default engine: the clients one after another, or several at a time in worker processes."""

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from torch import Tensor

from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..run_folder.directory import RunDirectory
from .continuing import Engine
from .observers import Observer
from .rounds import Clients, ClientTrainer, run_rounds
from .workers import client_workers, give, pack, unpack


def _run(federation: Federation, directory: RunDirectory, observer: Observer) -> RunDirectory:
    recipe = federation.recipe
    if recipe.clients_parallel == 1:
        return run_rounds(federation, directory, observer, LocalClients(federation, directory, observer))
    at_most = recipe.partition.clients if federation.method.personal else recipe.clients_per_round
    count = min(recipe.clients_parallel, at_most or recipe.partition.clients)
    with client_workers(federation, count) as pool:
        clients = ParallelClients(pool, count, federation, directory, observer)
        return run_rounds(federation, directory, observer, clients)


_ENGINE = Engine(build_federation, _run)
run, resume = _ENGINE.run, _ENGINE.resume

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
        replies: dict[int, Message] = {}
        for k, (replies[k], state) in self._each(sent, number, sent):
            self._directory.write_client(k, number, state)
            self._measured.pop(k, None)
        return replies, {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        # between the rounds measures of unchanged models are kept; before and after training more is measured
        known = self._measured if 0 < number < self._federation.recipe.rounds else {}
        clients = range(len(self._federation.client_rows))
        known |= self._each([k for k in clients if k not in known], number)
        for k in clients:
            yield k, *known[k]

    def _each(
        self, clients: Collection[int], number: int, sent: dict[int, Message] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield each client with its answer and next state or, where nothing is sent, its measures and spectrum."""
        for position, k in enumerate(clients):
            state = self._directory.client_state(k)
            if sent is None:
                yield k, self._trainer.evaluate(k, state, number)
            else:
                self._observer.client_began(number, k, position, len(clients))
                yield k, self._trainer.train(k, state, sent[k], number)


class ParallelClients(LocalClients):
    """Clients in worker processes, each of which takes one client after another; the run's folder stays here."""

    def __init__(self, pool: ProcessPoolExecutor, at_a_time: int, *arguments: Any):
        super().__init__(*arguments)
        self._pool, self._at_a_time = pool, at_a_time

    def _each(
        self, clients: Collection[int], number: int, sent: dict[int, Message] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield the clients in their order, so that an error is that of the first client with one.

        Tasks are made as results are taken: no more than two states for each worker are in memory.
        """
        waiting, running, done = iter(clients), deque[tuple[int, Future[bytes]]](), 0
        try:
            while True:
                for k in islice(waiting, 2 * self._at_a_time - len(running)):
                    if sent is not None:
                        self._observer.client_began(number, k, done, len(clients))
                    received = None if sent is None else pack(sent[k])
                    state = pack(self._directory.client_state(k))
                    running.append((k, give(self._pool, k, number, state, received)))
                if not running:
                    return
                k, result = running.popleft()
                done += 1
                yield k, unpack(result.result())
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process ended: most likely the memory ran out, or an error of it stands above. Free some "
                "memory and continue with fedssl run --resume RUN, if need be with fewer clients at a time "
                "(clients_parallel=1 behind it). A script that calls fedssl.run must do so below "
                "`if __name__ == '__main__':`"
            ) from error
