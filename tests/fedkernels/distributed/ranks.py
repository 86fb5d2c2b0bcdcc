"""Some processes of a gloo group that wait for functions to call: starting them takes longer than most tests."""

import datetime
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = datetime.timedelta(seconds=60)
# From a process that has imported torch: each would import it for seconds otherwise.
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["fedkernels", "pytest", "torch.distributed"])


class Ranks:
    """`size` processes of one group. A call runs ``function(*arguments)`` on each of them."""

    def __init__(self, size: int, folder: Path) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = _FORKING.Pipe()
            process = _FORKING.Process(target=_serve, args=(rank, size, str(folder / "store"), there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of all ranks; raises RuntimeError with the traceback of the first rank that failed."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self.pipes]
        for succeeded, result in answers:
            if not succeeded:
                raise RuntimeError(result)
        return [result for _, result in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    for outdated in (FutureWarning, DeprecationWarning):  # each worker of a user would print them
        warnings.filterwarnings("error", category=outdated, module=r"fedkernels|torch\.distributed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
    while True:
        function, arguments = pipe.recv()
        try:
            answer = True, function(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
