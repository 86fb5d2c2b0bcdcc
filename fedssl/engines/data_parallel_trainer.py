"""One client at a time, each trained by several processes together (`training.processes`)."""

from __future__ import annotations

import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..data_parallel.share import Share
from ..errors import UserError
from ..federation import Federation
from ..messages import Message
from .client_trainer import ClientTrainer
from .client_worker import ClientWorker, Team, Training
from .packed_message import pack, unpack

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
