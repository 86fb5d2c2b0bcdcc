"""Train clients in worker processes, which get a client's state with each task."""

import dataclasses
import io
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import forkserver
from typing import Any

import torch
import yaml

from ..data.datasets import Dataset
from ..errors import UserError
from ..federation import Federation, build_federation
from ..interrupts import interrupted_later, interrupts_ignored
from ..recipe.reading import parse_recipe
from .rounds import ClientTrainer

#: in a worker process, what it keeps between tasks
_own: dict[str, Any] = {}


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


def end_with_parent() -> None:
    """Make this worker process end as soon as its parent has ended, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


@contextmanager
def worker_pool(count: int, context: Any, begin: Callable[..., None], *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of so many worker processes, which begin by calling `begin`; all have ended after the body."""
    others = {*multiprocessing.active_children()}
    pool = ProcessPoolExecutor(count, context, begin, arguments)
    try:
        yield pool
    finally:
        for worker in {*multiprocessing.active_children()} - others:
            worker.kill()  # it is idle, or loses only a round that is not committed
        pool.shutdown(cancel_futures=True)


def client_workers(federation: Federation, count: int) -> AbstractContextManager[ProcessPoolExecutor]:
    """Return a pool of so many workers for `give`, each with its share of the threads.

    The images are moved into shared memory, which the workers map: they are in memory once. Images in a file are read
    from the one that this process has open.
    """
    # workers start at once, as forks of a server that has imported all and has no threads
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # the first optimiser imports the second
    with interrupts_ignored():
        forkserver.ensure_running()
    threads, number = max(1, torch.get_num_threads() // count), context.Value("i", 0)
    data = federation.recipe.to_yaml(), federation.dataset, dict(federation.downstream)
    return worker_pool(count, context, _begin, threads, number, data)


def give(pool: ProcessPoolExecutor, client: int, number: int, state: bytes, received: bytes | None) -> Future[bytes]:
    """Give a client's part in a round or, without a message, the evaluation of its own model after it to a pool.

    State and message are packed. The pool starts a worker where none is free.
    """
    try:
        with interrupted_later():  # half a worker ends with a traceback
            return pool.submit(_work, client, number, state, received)
    except RuntimeError as error:
        if isinstance(error, BrokenProcessPool):
            raise
        raise UserError(
            f"the images cannot be put into the memory that processes share ({error}): enlarge it (in a container "
            "with --shm-size), or set clients_parallel=1"
        ) from error


def _begin(threads: int, number: Any, data: tuple[str, Dataset, dict[str, Dataset]]) -> None:
    """Prepare this process, one of `number` so far, for tasks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(threads)
    _own["data"] = data
    with number.get_lock():
        card, number.value = number.value, number.value + 1
    if torch.cuda.is_available():  # the workers take the cards in turn
        torch.cuda.set_device(card % torch.cuda.device_count())


def _work(client: int, number: int, state: bytes, received: bytes | None) -> bytes:
    """Return (answer, next state) of a client's part in a round, or (measures, spectrum) of an evaluation, packed."""
    try:
        trainer = _own.get("trainer") or _own.setdefault("trainer", ClientTrainer(_federation(*_own["data"])))
        if received is None:
            return pack(trainer.evaluate(client, unpack(state), number))
        return pack(trainer.train(client, unpack(state), unpack(received), number))
    except UserError as error:  # of a custom part's class the parent may know nothing
        raise UserError(str(error)) from None
    except Exception as error:
        raise RuntimeError(f"client {client}: {traceback.format_exc()}") from error


def _federation(recipe_text: str, dataset: Dataset, downstream: dict[str, Dataset]) -> Federation:
    """Return the parent's federation with its data. The recipe is text, because your own parts cannot be pickled."""
    recipe = parse_recipe(yaml.safe_load(recipe_text))
    evaluation = recipe.evaluation.model_copy(update={"downstream": None})
    federation = build_federation(recipe.model_copy(update={"evaluation": evaluation}), dataset)
    return dataclasses.replace(federation, downstream=downstream)
