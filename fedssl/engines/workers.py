"""Train clients in worker processes, which get a client's state with each task."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import yaml

from ..data.datasets import Dataset
from ..errors import UserError
from ..federation import Federation, build_federation
from ..recipe.reading import parse_recipe
from .rounds import ClientTrainer


class Task(NamedTuple):
    """A client's part in a round or, without a message, the evaluation of its own model after the round.

    State and message are packed.
    """

    client: int
    round: int
    state: bytes
    received: bytes | None = None


def pack(content: Any) -> bytes:
    """Return messages and tensors as bytes, of which `unpack` makes equal ones on the CPU.

    Names keep their order and tensors their strides, as sums and matrix products over others may round differently. A
    pipe would send each tensor through shared memory, which takes a file descriptor.
    """
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getvalue()


def unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes that are started in the body ignore Ctrl-C: their parent handles it for all."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():  # no other one can set a handler
            stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        yield


def end_with_parent() -> None:
    """Make this worker process end as soon as its parent has ended, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


class ClientWorker:
    """A worker process with `threads` threads, seen from the process that starts it.

    The images are moved into shared memory, which the worker maps: they are in memory once. Images in a file are read
    from the one that this process has open.
    """

    def __init__(self, federation: Federation, threads: int, card: int):
        context = _process_context()
        self.connection, theirs = context.Pipe()
        data = federation.recipe.to_yaml(), federation.dataset, dict(federation.downstream)
        self.process = context.Process(target=_work, args=(theirs, threads, card, data))
        try:
            with interrupts_ignored():  # a spawned worker ignores them before it has imported anything
                self.process.start()
        except RuntimeError as error:
            raise UserError(
                f"the images cannot be put into the memory that processes share ({error}): enlarge it (in a container "
                "with --shm-size), or set clients_parallel=1"
            ) from error
        theirs.close()

    def give(self, task: Task) -> None:
        try:
            self.connection.send(task)
        except OSError as error:
            raise self.lost(task.client) from error

    def take(self, client: int) -> tuple[Any, UserError | RuntimeError | None]:
        """Wait for the end of a task, and return (result, None) or (None, its error); a bug is a RuntimeError."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self.lost(client) from error
        if kind == "bug":
            return None, RuntimeError(f"client {client}: {content}")
        return (None, content) if kind == "error" else (unpack(content), None)

    def lost(self, client: int) -> UserError:
        """Return the error of a worker process that ended while it worked on a client."""
        self.process.join(timeout=10)  # seconds; it has closed its pipe, so that it has ended or is about to
        code = self.process.exitcode or 0
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        cause = (
            "most likely the memory ran out. Free some memory and continue with fedssl run --resume RUN, if need be "
            "with fewer clients at a time (clients_parallel=1 behind it)"
            if code < 0
            else "its error is above. A script that calls fedssl.run must do so below `if __name__ == '__main__':`"
        )
        return UserError(f"the worker process of client {client} {ended}: {cause}")


@contextmanager
def started_workers(federation: Federation, count: int) -> Iterator[list[ClientWorker]]:
    """Start so many workers, each with its share of the threads; all have ended after the body."""
    threads = max(1, torch.get_num_threads() // count)
    workers: list[ClientWorker] = []
    try:
        for card in range(count):
            workers.append(ClientWorker(federation, threads, card))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()  # it is idle, or works on a client whose round is not committed
        for worker in workers:
            worker.process.join()


def _process_context() -> Any:
    """Return a context that starts workers at once: as forks of a server that has imported all and has no threads."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # the first optimiser imports the second
    with interrupts_ignored():
        forkserver.ensure_running()
    return context


def _work(pipe: Connection, threads: int, card: int, data: tuple[str, Dataset, dict[str, Dataset]]) -> None:
    """Do tasks and send the outcome of each until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(threads)
    if torch.cuda.is_available():  # the workers take the cards in turn
        torch.cuda.set_device(card % torch.cuda.device_count())
    trainer: ClientTrainer | None = None
    outcome: tuple[str, Any]
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        while True:
            task = pipe.recv()
            try:
                trainer = trainer or ClientTrainer(_federation(*data))
                outcome = "done", _result(trainer, task)
            except UserError as error:  # of a custom part's class the parent may know nothing
                outcome = "error", UserError(str(error))
            except Exception:
                outcome = "bug", traceback.format_exc()
            pipe.send(outcome)


def _federation(recipe_text: str, dataset: Dataset, downstream: dict[str, Dataset]) -> Federation:
    """Return the parent's federation with its data. The recipe is text, because your own parts cannot be pickled."""
    recipe = parse_recipe(yaml.safe_load(recipe_text))
    evaluation = recipe.evaluation.model_copy(update={"downstream": None})
    federation = build_federation(recipe.model_copy(update={"evaluation": evaluation}), dataset)
    return dataclasses.replace(federation, downstream=downstream)


def _result(trainer: ClientTrainer, task: Task) -> bytes:
    """Return (answer, next state) of a client's part in a round, or (measures, spectrum) of an evaluation, packed."""
    if task.received is None:
        return pack(trainer.evaluate(task.client, unpack(task.state), task.round))
    return pack(trainer.train(task.client, unpack(task.state), unpack(task.received), task.round))
