"""Where the clients' states live between their rounds."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from .progress import Progress
from .rounds import evaluate_after


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
        """A client's last state; empty where it has not taken part yet. The caller may change it."""
        if self._kept is None:
            return self._directory.client_state(index)
        if index not in self._kept:  # of a run that was resumed
            self._kept[index] = self._directory.client_state(index)
        return self._kept[index].copy()

    def store(self, index: int, round_number: int, state: Message) -> None:
        """Keep a client's state after its part in a round."""
        self._directory.write_client(index, round_number, state)
        if self._kept is not None:
            self._kept[index] = state.copy()

    def discard(self, index: int) -> None:
        """Take back what `store` kept in this round, so that the client's state is again the committed one."""
        self._directory.discard_client(index)
        if self._kept is not None:
            self._kept.pop(index, None)


class ClientTrainer:
    """One client at a time, loaded from its state into the model that the client before has left.

    It keeps nothing of a client: what a client answers does not depend on which clients came before.
    """

    def __init__(self, federation: Federation):
        self._federation = federation
        self._models: dict[str, Model] = {}  # the last client's of each architecture, which the next one reuses

    def train(self, index: int, state: Message, received: Message, number: int) -> tuple[Message, Message]:
        """A client's answer to a round's message, and its state after the round.

        The state must be written or copied before the next call, see `Federation.state_in_place`.

        Raises:
            UserError: see `Federation.client` and `train_locally`.
        """
        client = self._load(index, state)
        reply = self._federation.method.client_round(client, received, number)
        return reply, self._federation.state_in_place(client, number)

    def evaluate(self, index: int, state: Message, number: int) -> tuple[dict[str, float], Tensor]:
        """Measures and spectrum of a client's own model after a round; see `evaluate_after`."""
        return evaluate_after(self._federation, self._load(index, state).model, number)

    def _load(self, index: int, state: Message) -> Client:
        architecture = self._federation.recipe.architecture_of(index)
        client = self._federation.client(index, state, self._models.get(architecture))
        self._models[architecture] = client.model
        return client


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's entries in the order in which they lie in memory, and what makes them a tensor again."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class PackedMessage:
    """A message whose tensors are bytes.

    The order of the tensors' names and the strides are kept, as sums and matrix products over other ones may round
    differently. A pipe's own way for tensors, shared memory, takes a file descriptor for each of them.
    """

    tensors: dict[str, PackedTensor]
    numbers: dict[str, float]
    config: dict[str, str | int | float | bool]
    metrics: dict[str, float]


def pack(message: Message) -> PackedMessage:
    """A message as bytes; `unpack` makes an equal one of it on the CPU."""
    tensors = {name: _pack(tensor) for name, tensor in message.tensors.items()}
    return PackedMessage(tensors, message.numbers, message.config, message.metrics)


def unpack(packed: PackedMessage) -> Message:
    """The message that was packed, in memory of its own."""
    tensors = {name: _unpack(tensor) for name, tensor in packed.tensors.items()}
    return Message(tensors, packed.numbers, packed.config, packed.metrics)


def _pack(tensor: torch.Tensor) -> PackedTensor:
    tensor = tensor.detach().cpu()
    if torch.empty_like(tensor).stride() != tensor.stride():  # its entries overlap or have gaps between them
        tensor = tensor.contiguous()
    entries = tensor.as_strided((tensor.numel(),), (1,))
    return PackedTensor(
        entries.view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    )


def _unpack(packed: PackedTensor) -> torch.Tensor:
    data = np.frombuffer(packed.data, np.uint8)
    # In torch's own memory, which is aligned: a matrix product can round differently on memory that is not.
    entries = torch.empty(len(data) // packed.dtype.itemsize, dtype=packed.dtype)
    entries.view(torch.uint8).numpy()[:] = data
    return entries.as_strided(packed.shape, packed.strides)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Processes that are started in the body ignore Ctrl-C: their parent handles it for all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """From now on this worker process ends as soon as its parent has ended, also where the parent was killed."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


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


_PRELOADED = ["fedssl.engines.workers", "torch._dynamo"]  # the first optimiser imports the second


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


#: seconds in which a process that has died is found, where another one tells that it has lost it
_GRACE = 1.0


def check_devices(federation: Federation) -> None:
    """Check that each process of a client's training gets a GPU of its own, where it trains on GPUs (UserError)."""
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
    """Trains each client in worker processes, evaluates in this one; its workers have ended when its body has.

    Every worker gets the client's state and the server's message and runs the client's whole round, on its share of
    every batch. Their weights stay bit-identical, and the first one answers. If one fails or ends, the others may wait
    for it, so that none can be used any more.
    """

    def __init__(self, federation: Federation):
        super().__init__(federation)
        self._workers: list[ClientWorker] = []

    def __enter__(self) -> DataParallelTrainer:
        processes = self._federation.recipe.training.processes
        threads = max(1, torch.get_num_threads() // processes)
        self._folder = tempfile.TemporaryDirectory()
        meeting_point = Path(self._folder.name) / "processes"
        try:
            for rank in range(processes):
                team = Team(Share(rank, processes), meeting_point, self._federation.device.type)
                self._workers.append(ClientWorker(self._federation, threads, team))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.process.kill()  # it is idle, or trains a client whose round is not committed
        for worker in self._workers:
            worker.process.join()
        self._folder.cleanup()

    def train(self, index: int, state: Message, received: Message, number: int) -> tuple[Message, Message]:
        """See `ClientTrainer.train`.

        Raises:
            UserError: a client's, or a worker process ended.
            RuntimeError: an error in a worker that is not a UserError, with its traceback.
        """
        task = Training(index, number, pack(state), pack(received))
        for worker in self._workers:
            worker.give(task)
        working = {worker.connection: worker for worker in self._workers}
        results = []
        while working:
            for connection in wait(list(working)):
                worker = working.pop(cast(Any, connection))
                kind, content = worker.take(index)
                if kind == "error":
                    raise UserError(content)
                if kind == "bug":
                    self._require_alive(index)
                    raise RuntimeError(f"client {index}: {content}")
                results.append(content)
        reply, next_state = next(result for result in results if result is not None)
        return unpack(reply), unpack(next_state)

    def _require_alive(self, index: int) -> None:
        """Raise the error of a worker that has ended: where one has, the others fail as they lose it."""
        ended = wait([worker.process.sentinel for worker in self._workers], timeout=_GRACE)
        for worker in self._workers:
            if worker.process.sentinel in ended:
                raise worker.lost(index)
