"""Clients on this machine: where their states are kept, and the worker processes that train them.

`ClientTrainer` trains a client in the process that calls it. `ParallelClients` trains several at a time, each in a
worker process; `DataParallelTrainer` trains one at a time in several worker processes, each on its share of every
batch. A worker holds no state of a client: it receives the client's state with a task, and returns the next state.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from ..client import Client
from ..data.datasets import Dataset
from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..models.data_parallel import Share, join
from ..models.model import Model
from ..recipe.reading import parse_recipe
from ..recipe.recipe import Place
from ..run.directory import RunDirectory
from .observers import Observer
from .rounds import Clients, evaluate_after

# In this process


class ClientStates:
    """The clients' states during a run: one at a time in memory (`disk`), or all that have taken part (`memory`).

    Either way a state is written into the run's folder as soon as its client is done, and counts from the round's
    commit on, so a run resumes alike. With `disk`, memory does not grow with the number of clients; `memory` spares
    reading the files.
    """

    def __init__(self, directory: RunDirectory, place: Place):
        self._directory = directory
        self._kept: dict[int, Message] | None = {} if place == "memory" else None

    def load(self, index: int) -> Message:
        """Return a client's last state, which the caller may change; empty if it has not taken part yet."""
        if self._kept is None:
            return self._directory.client_state(index)
        if index not in self._kept:  # the run was resumed
            self._kept[index] = self._directory.client_state(index)
        return self._kept[index].copy()

    def store(self, index: int, round_number: int, state: Message) -> None:
        """Keep a client's state after its part in a round."""
        self._directory.write_client(index, round_number, state)
        if self._kept is not None:
            self._kept[index] = state.copy()

    def discard(self, index: int) -> None:
        """Undo `store` in this round, so that the client's state is again the committed one."""
        self._directory.discard_client(index)
        if self._kept is not None:
            self._kept.pop(index, None)


class ClientsHere(Clients):
    """Base of the clients on this machine: their states are in the run's folder, their replies in memory."""

    def __init__(self, federation: Federation, directory: RunDirectory, observer: Observer):
        self._federation, self._observer = federation, observer
        self._states = ClientStates(directory, federation.recipe.client_states)

    def discard(self, index: int) -> None:
        self._states.discard(index)

    def kept(self, reply: Message) -> Message:
        return reply

    def images(self) -> dict[int, int]:
        return {k: len(rows) for k, rows in enumerate(self._federation.client_rows)}

    def epsilons(self) -> dict[int, float]:
        return {}


class ClientTrainer:
    """Trains and evaluates one client at a time, loaded from its state into the model that the client before has left.

    It keeps nothing of a client: a client's answer does not depend on which clients came before.
    """

    def __init__(self, federation: Federation):
        self._federation = federation
        self._models: dict[str, Model] = {}  # the last client's of each architecture, which the next one reuses

    def train(self, index: int, state: Message, received: Message, number: int) -> tuple[Message, Message]:
        """Return a client's answer to a round's message, and its state after the round.

        The state must be written or copied before the next call, see `Federation.state_in_place`.

        Raises:
            UserError: see `Federation.client` and `train_locally`.
        """
        client = self._load(index, state)
        reply = self._federation.method.client_round(client, received, number)
        return reply, self._federation.state_in_place(client, number)

    def evaluate(self, index: int, state: Message, number: int) -> tuple[dict[str, float], Tensor]:
        """Return measures and spectrum of a client's own model after a round; see `evaluate_after`."""
        return evaluate_after(self._federation, self._load(index, state).model, number)

    def _load(self, index: int, state: Message) -> Client:
        architecture = self._federation.recipe.architecture_of(index)
        client = self._federation.client(index, state, self._models.get(architecture))
        self._models[architecture] = client.model
        return client


# Messages between processes


class PackedTensor(NamedTuple):
    """A tensor's entries in the order in which they lie in memory, and what makes them a tensor again."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PackedMessage(NamedTuple):
    """A message whose tensors are bytes.

    The order of the tensors' names and the strides are kept, as sums and matrix products over other ones may round
    differently. A pipe's own way for tensors, shared memory, takes a file descriptor for each of them.
    """

    tensors: dict[str, PackedTensor]
    numbers: dict[str, float]
    config: dict[str, str | int | float | bool]
    metrics: dict[str, float]


class Task(NamedTuple):
    """A client's part in a round or, without a message, the evaluation of its own model after the round."""

    client: int
    round: int
    state: PackedMessage
    received: PackedMessage | None = None


def pack(message: Message) -> PackedMessage:
    """Return a message as bytes; `unpack` makes an equal one of it on the CPU."""
    tensors = {name: _pack_tensor(tensor) for name, tensor in message.tensors.items()}
    return PackedMessage(tensors, message.numbers, message.config, message.metrics)


def unpack(packed: PackedMessage) -> Message:
    """Return the message that was packed, in new memory."""
    tensors = {name: _unpack_tensor(tensor) for name, tensor in packed.tensors.items()}
    return Message(tensors, packed.numbers, packed.config, packed.metrics)


def _pack_tensor(tensor: Tensor) -> PackedTensor:
    tensor = tensor.detach().cpu()
    if torch.empty_like(tensor).stride() != tensor.stride():  # its entries overlap or have gaps between them
        tensor = tensor.contiguous()
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    return PackedTensor(data, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _unpack_tensor(packed: PackedTensor) -> Tensor:
    # In torch's own memory, which is aligned: a matrix product can round differently on memory that is not.
    entries = torch.empty(len(packed.data) // packed.dtype.itemsize, dtype=packed.dtype)
    entries.view(torch.uint8).numpy()[:] = np.frombuffer(packed.data, np.uint8)
    return entries.as_strided(packed.shape, packed.strides)


# Worker processes


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes that are started in the body ignore Ctrl-C: their parent handles it for all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """Make this worker process end as soon as its parent has ended, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


class Team(NamedTuple):
    """A worker's place among those that train one client together."""

    share: Share
    meeting_point: Path
    device_type: str


class ClientWorker:
    """The worker process, seen from the process that starts it.

    The data set is moved into shared memory, which the worker maps: it is in memory once. Images in a file are read
    from the one that this process has open.

    Args:
        federation: of the run; the worker makes its own of the same recipe and images.
        threads: torch's in the worker.
        team: its place among the workers that train each client together; None if it trains clients alone.

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
        """Send a task; raise a UserError if the process has ended."""
        try:
            self.connection.send(task)
        except OSError as error:
            raise self.lost(task.client) from error

    def take(self, client: int) -> tuple[Any, UserError | RuntimeError | None]:
        """Wait for a task to end, and return its result and None, or None and its error.

        An error in the worker that is not a UserError is a RuntimeError with its traceback.

        Raises:
            UserError: the process has ended; the message names the client on which it was.
        """
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.lost(client) from error
        if kind == "error":
            return None, UserError(content)
        if kind == "bug":
            return None, RuntimeError(f"client {client}: {content}")
        return content, None

    def lost(self, client: int) -> UserError:
        """Return the error of a worker process that ended while it worked on a client."""
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


@contextmanager
def _started(federation: Federation, teams: Sequence[Team | None]) -> Iterator[list[ClientWorker]]:
    """Start a worker for each team with its share of the threads; all have ended after the body."""
    threads = max(1, torch.get_num_threads() // len(teams))
    workers: list[ClientWorker] = []
    try:
        for team in teams:
            workers.append(ClientWorker(federation, threads, team))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()  # it is idle, or works on a client whose round is not committed
        for worker in workers:
            worker.process.join()


def _process_context() -> Any:
    """Return that of forks of a server that has imported everything, if the system has them: they start at once.

    The server runs no other code, and so no threads that a fork would lack.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # the first optimiser imports the second
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
    """Do the tasks of a worker process until its parent ends it; of a team only the first worker returns results.

    It sends `("done", result)`, `("error", message of a UserError)` or `("bug", traceback)` for each task.
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
    """Return the parent's federation with its data. The recipe is text, because your own parts cannot be pickled."""
    recipe = parse_recipe(yaml.safe_load(recipe_text))
    evaluation = recipe.evaluation.model_copy(update={"downstream": None})
    federation = build_federation(recipe.model_copy(update={"evaluation": evaluation}), dataset)
    return dataclasses.replace(federation, downstream=downstream)


def _result(trainer: ClientTrainer, task: Task) -> Any:
    """Return (answer, next state) of a client's part in a round, or (measures, spectrum) of an evaluation."""
    if task.received is None:
        measures, spectrum = trainer.evaluate(task.client, unpack(task.state), task.round)
        return measures, _pack_tensor(spectrum)
    reply, state = trainer.train(task.client, unpack(task.state), unpack(task.received), task.round)
    return pack(reply), pack(state)


# Several clients at a time


class ParallelClients(ClientsHere):
    """Clients in worker processes, each of which takes one client after another; a context manager.

    Only this process reads and writes the run's folder. Answers are put in the order of the clients before anything
    reads them, so that a run is the same whoever is ready first.

    The workers are processes with a pipe each, as a pool of concurrent.futures would not say which client a worker that
    ended was on.
    """

    def __enter__(self) -> ParallelClients:
        recipe = self._federation.recipe
        at_most = recipe.partition.clients if self._federation.method.personal else recipe.clients_per_round
        count = min(recipe.clients_parallel, at_most or recipe.partition.clients)
        self._stack = ExitStack()
        started = self._stack.enter_context(_started(self._federation, [None] * count))
        self._workers: dict[Connection, ClientWorker] = {worker.connection: worker for worker in started}
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        def training(k: int) -> Task:
            self._observer.client_began(number, k, len(replies), len(sent))
            return Task(k, number, pack(self._states.load(k)), pack(sent[k]))

        replies: dict[int, Message] = {}
        for k, (reply, state) in self._results(sent, training):
            replies[k] = unpack(reply)
            self._states.store(k, number, unpack(state))
        return {k: replies[k] for k in sent}, {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        clients = range(len(self._federation.client_rows))
        evaluated = dict(self._results(clients, lambda k: Task(k, number, pack(self._states.load(k)))))
        for k in clients:
            measures, spectrum = evaluated.pop(k)
            yield k, measures, _unpack_tensor(spectrum)

    def _results(self, clients: Iterable[int], task: Callable[[int], Task]) -> Iterator[tuple[int, Any]]:
        """Yield each client with its task's result, in the order in which the workers are ready.

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
                result, error = self._workers[connection].take(busy[connection])
                k = busy.pop(connection)
                free.append(connection)
                if error is None:
                    yield k, result
                else:
                    failed[k] = error


# One client in several processes


def check_devices(federation: Federation) -> None:
    """Raise a UserError unless each process of a client's training gets its own GPU, if it trains on GPUs."""
    processes = federation.recipe.training.processes
    if processes == 1:
        return
    if not dist.is_available():
        raise UserError(
            f"training.processes={processes} needs a torch with torch.distributed, which this one lacks: use "
            "training.processes=1"
        )
    if federation.device.type == "cuda" and torch.cuda.device_count() < processes:
        raise UserError(
            f"training.processes={processes} needs as many CUDA devices, and this torch sees "
            f"{torch.cuda.device_count()}: lower it, or use device=cpu"
        )


class DataParallelTrainer(ClientTrainer):
    """Trains each client in several worker processes, evaluates in this one; a context manager.

    Every worker gets the client's state and the server's message and runs the client's whole round, on its share of
    every batch. Their weights stay bit-identical, and the first one answers. If one fails or ends, the others may wait
    for it, so that none can be used any more.
    """

    def __enter__(self) -> DataParallelTrainer:
        processes = self._federation.recipe.training.processes
        with ExitStack() as stack:
            meeting_point = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "processes"
            shares = [Share(rank, processes) for rank in range(processes)]
            teams = [Team(share, meeting_point, self._federation.device.type) for share in shares]
            self._workers = stack.enter_context(_started(self._federation, teams))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def train(self, index: int, state: Message, received: Message, number: int) -> tuple[Message, Message]:
        """Return the same as `ClientTrainer.train`.

        Raises:
            UserError: a client's, or a worker process ended.
            RuntimeError: an error in a worker that is not a UserError, with its traceback.
        """
        task = Task(index, number, pack(state), pack(received))
        for worker in self._workers:
            worker.give(task)
        working = {worker.connection: worker for worker in self._workers}
        results = []
        while working:
            for connection in cast(list[Connection], wait(list(working))):
                result, error = working.pop(connection).take(index)
                if isinstance(error, RuntimeError):
                    self._require_alive(index)
                if error is not None:
                    raise error
                results.append(result)
        reply, next_state = next(result for result in results if result is not None)
        return unpack(reply), unpack(next_state)

    def _require_alive(self, index: int) -> None:
        """Raise the error of a worker that has ended, within a second: if one has, the others fail as they lose it."""
        ended = wait([worker.process.sentinel for worker in self._workers], timeout=1.0)
        for worker in self._workers:
            if worker.process.sentinel in ended:
                raise worker.lost(index)
