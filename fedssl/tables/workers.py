"""Runs the cells of a table: here one after another, or several at a time in worker processes.

Every worker process imports this module, so it imports nothing that draws: matplotlib would cost each of them a second.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from ..engines import engine_of, in_process
from ..engines.worker_processes import end_with_parent, interrupts_ignored
from ..errors import UserError
from ..reading import parse_recipe
from ..recipe import Recipe
from .cells import Cell
from .progress import Progress


class _Rounds(in_process.Silent):
    """Calls a function with the number of each committed round."""

    def __init__(self, round_committed: Callable[[int], None]):
        self.round_committed = round_committed

    def round_done(self, round_number: int, metrics: dict[str, float]) -> None:
        self.round_committed(round_number)


def _run(recipe: Recipe, path: Path, round_committed: Callable[[int], None]) -> None:
    """Run a cell, or continue it where it was stopped."""
    if (path / "recipe.yaml").is_file():
        engine_of(recipe).resume(path, _Rounds(round_committed))
    else:
        engine_of(recipe).run(recipe, path, _Rounds(round_committed))


def run_here(cells: Sequence[Cell], progress: Progress) -> None:
    """Run cells one after another in this process. A cell that fails is told to `progress`, and the others go on."""
    for cell in cells:
        try:
            _run(cell.recipe, cell.path, partial(progress.round_done, cell))
        except UserError as error:
            progress.cell_ended(cell, str(error))
        else:
            progress.cell_ended(cell)


def run_in_processes(cells: Sequence[Cell], jobs: int, progress: Progress) -> None:
    """Run cells in worker processes, each of which takes one cell after another.

    All worker processes have ended when this returns or raises. A cell that fails is told to `progress`, and the others
    go on.

    Args:
        cells: what to run.
        jobs: the number of worker processes; each gets its share of the processor cores as threads.
        progress: is told each committed round and each cell that ended.

    Raises:
        RuntimeError: an error in a worker that is not a UserError, with its traceback.
        KeyboardInterrupt: on Ctrl-C.
    """
    context = multiprocessing.get_context("spawn")  # a forked child may hang in torch's thread pool
    threads = max(1, (os.cpu_count() or 1) // max(jobs, 1))
    queue = list(reversed(cells))
    busy: dict[Connection, Cell] = {}
    workers: dict[Connection, Any] = {}

    def start_worker() -> None:
        ours, theirs = context.Pipe()
        # not a daemon, which may not start the processes of clients_parallel
        worker = context.Process(target=_work, args=(theirs, threads))
        with interrupts_ignored():
            worker.start()
        theirs.close()
        workers[ours] = worker
        give(ours)

    def give(connection: Connection) -> None:
        if queue:
            cell = busy[connection] = queue.pop()
            # as text, because a part from the user's own file cannot be pickled
            connection.send((cell.recipe.to_yaml(), cell.path))
        else:
            connection.send(None)

    try:
        for _ in range(jobs):
            start_worker()
        while busy:
            for connection in cast(list[Connection], wait(list(busy))):
                cell = busy[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    del busy[connection]
                    worker = workers.pop(connection)
                    worker.join()
                    message = f"its process ended with code {worker.exitcode}; was memory short? try a smaller --jobs"
                    progress.cell_ended(cell, message)
                    if queue:
                        start_worker()
                    continue
                if kind == "round":
                    progress.round_done(cell, content)
                elif kind == "bug":
                    raise RuntimeError(f"{cell}: {content}")
                else:
                    del busy[connection]
                    progress.cell_ended(cell, content)
                    give(connection)
    finally:
        for worker in workers.values():
            worker.terminate()  # it is idle, or loses only the round that is not committed yet
        for worker in workers.values():
            worker.join()


def _work(connection: Connection, threads: int) -> None:
    """A worker process. It receives (recipe, folder) of a cell again and again, and ends when it receives None.

    It sends `("round", number)` after each commit, `("end", error message or None)` after a cell, and
    `("bug", traceback)` where something else than a UserError was raised.
    """
    end_with_parent()
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # OMP_NUM_THREADS can ask for fewer
    while (task := connection.recv()) is not None:
        text, path = task
        try:
            recipe = parse_recipe(yaml.safe_load(text))
            _run(recipe, path, lambda number: connection.send(("round", number)))
        except UserError as error:
            connection.send(("end", str(error)))
        except Exception:
            connection.send(("bug", traceback.format_exc()))
        else:
            connection.send(("end", None))
