"""Running a table: cell by cell, here or in worker processes, and continued where it was stopped.

OUTPUT/table.yaml                             the table that was run
OUTPUT/<row's label>/[<scenario>/]seed-<n>/   one run's folder a cell
OUTPUT/table.md, table.html                   the table, with mean, spread and the paper's figures
OUTPUT/summary.csv, table.csv                 the same as data, and every seed's value
OUTPUT/picture.png                            the table as a picture; with scenarios picture-<scenario>.png

Every worker process imports this module, so what draws (matplotlib) is imported only where the parent needs it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from ..engines import engine_of, in_process
from ..errors import UserError
from ..reading import parse_recipe
from ..recipe import Recipe
from ..run_directory import RunDirectory
from ..storage import cannot_write, write_atomically
from .table import Table, cell_path, cell_recipe

_NOTE_SECONDS = 30.0
Note = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class _Cell:
    label: str
    seed: int
    recipe: Recipe
    path: Path

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.path / "recipe.yaml").is_file() and RunDirectory.open(self.path).checkpoint.finished


def run_table(
    table: Table, output: Path, overrides: Sequence[str] = (), jobs: int = 1, note: Note | None = None
) -> Path:
    """Run what is not yet finished of a table, then write its results into `output`.

    Nothing is run before all recipes are checked. Stopped at any moment (Ctrl-C raises KeyboardInterrupt, after the
    worker processes have ended), the same call continues. A cell that fails with a UserError does not stop the others.

    Args:
        table: see `load_table`.
        output: the folder; new, empty, or the same table's.
        overrides: `key=value`, for all rows.
        jobs: cells at a time, each in a process of its own with its share of the processor cores as threads.
        note: is told lines of progress, and in the end the table and its verdict.

    Returns:
        `output`.

    Raises:
        UserError: a recipe that is refused; a cell in `output` that another recipe has made; cells that failed.
    """
    from .results import format_table, read_results, verdict, write_results

    say = note or (lambda text: None)
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    cells = [
        _Cell(
            f"{row.label}, {scenario.label}" if scenario.label else row.label,
            seed,
            cell_recipe(table, row, seed, overrides, scenario),
            cell_path(output, row.label, seed, scenario.label),
        )
        for seed in table.seeds  # first, so that a table that is stopped compares all rows
        for scenario in table.all_scenarios
        for row in table.rows
    ]
    _check_output(output, cells)
    header = "".join(f"# with {' '.join(override.split())}\n" for override in overrides)
    content = yaml.safe_dump(table.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error) from error
    write_atomically(output / "table.yaml", (header + content).encode())

    waiting = [cell for cell in cells if not cell.finished]
    say(f"{table.name}: {len(cells)} runs, {len(cells) - len(waiting)} of them finished already; in {output}")
    progress = _Progress(say, len(cells), len(waiting))
    if jobs == 1:
        _run_here(waiting, progress)
    else:
        _run_in_processes(waiting, min(jobs, len(waiting)), progress)
    results = [read_results(table, output, scenario) for scenario in table.all_scenarios]
    if any(one.finished for one in results):
        write_results(table, results, output)
        for one in results:
            if one.finished:
                say("\n" + "\n\n".join(filter(None, (one.label, format_table(table, one), verdict(table, one)))))
        pictures = ", ".join(str(output / one.picture) for one in results if one.finished)
        say(f"\npicture: {pictures}\npage:    {output / 'table.html'}")
    failures = progress.failures
    if failures:
        listed = "; ".join(f"{cell}: {failures[cell]}" for cell in cells if cell in failures)
        raise UserError(f"{len(failures)} of {len(cells)} runs failed: {listed}")
    return output


def _check_output(output: Path, cells: Sequence[_Cell]) -> None:
    """Refuse a folder with other things in it, or with cells that other recipes have made."""
    from ..reports.report import flatten

    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder as the table's output")
    if output.is_dir() and any(output.iterdir()) and not (output / "table.yaml").is_file():
        raise UserError(f"{output} is not empty and holds no table.yaml: name a new folder as the table's output")
    for cell in cells:
        path = cell.path / "recipe.yaml"
        if not path.is_file():
            continue
        try:
            stored = flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
        wanted = flatten(yaml.safe_load(cell.recipe.to_yaml()))
        for key in dict.fromkeys([*wanted, *stored]):
            if key != "description" and wanted.get(key) != stored.get(key):
                raise UserError(
                    f"{cell.path} was made with {key}={stored.get(key)}, now it is {wanted.get(key)}: "
                    "name another output, or remove that folder"
                )


class _Progress:
    """What ended and what failed, told in lines: one when a cell ends, and one now and then while none does."""

    def __init__(self, say: Note, cells: int, waiting: int):
        self.say, self.cells, self.waiting = say, cells, waiting
        self.failures: dict[_Cell, str] = {}
        self.ended = 0
        self.started = self.last = time.monotonic()

    def round(self, cell: _Cell, number: int) -> None:
        if time.monotonic() - self.last >= _NOTE_SECONDS:
            self._tell(f"{cell}: round {number} of {cell.recipe.rounds}")

    def end(self, cell: _Cell, failure: str | None = None) -> None:
        self.ended += 1
        left = (self.waiting - self.ended) * (time.monotonic() - self.started) / self.ended
        time_left = f"; {_duration(left)} left" if self.ended < self.waiting else ""
        if failure is None:
            state = _reached(cell.path)
        else:
            self.failures[cell] = failure
            state = f"failed: {failure}"
        self._tell(f"{self.cells - self.waiting + self.ended}/{self.cells}  {cell}: {state}{time_left}")

    def _tell(self, text: str) -> None:
        self.last = time.monotonic()
        self.say(text)


def _reached(path: Path) -> str:
    """A finished run's accuracies in a few words."""
    from ..run_record import read_run
    from .results import JUDGED

    run = read_run(path)
    found = ((metric, run.evaluated(metric, "after")) for metric in JUDGED)
    return ", ".join(f"{metric} {value:.1f}" for metric, value in found if value is not None)


class _Rounds(in_process.Silent):
    """Hands the engine's rounds on."""

    def __init__(self, tell: Callable[[int], None]):
        self.tell = tell

    def round_done(self, round_number: int, metrics: dict[str, float]) -> None:
        self.tell(round_number)


def _run_cell(recipe: Recipe, path: Path, tell: Callable[[int], None]) -> None:
    if (path / "recipe.yaml").is_file():
        engine_of(recipe).resume(path, _Rounds(tell))
    else:
        engine_of(recipe).run(recipe, path, _Rounds(tell))


def _run_here(cells: Sequence[_Cell], progress: _Progress) -> None:
    for cell in cells:
        try:
            _run_cell(cell.recipe, cell.path, partial(progress.round, cell))
        except UserError as error:
            progress.end(cell, str(error))
        else:
            progress.end(cell)


def _run_in_processes(cells: Sequence[_Cell], jobs: int, progress: _Progress) -> None:
    """Each worker process takes one cell after another; all have ended when this returns or raises."""
    context = multiprocessing.get_context("spawn")  # a forked child may hang in torch's thread pool
    threads = max(1, (os.cpu_count() or 1) // max(jobs, 1))
    queue = list(reversed(cells))
    busy: dict[Connection, _Cell] = {}
    workers: dict[Connection, Any] = {}

    def start_worker() -> None:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, threads), daemon=True)
        with _interrupts_ignored():  # children inherit it: Ctrl-C is this process's to handle
            worker.start()
        theirs.close()
        workers[ours] = worker
        give(ours)

    def give(connection: Connection) -> None:
        if queue:
            cell = busy[connection] = queue.pop()
            # as text: a part from the user's own file cannot be pickled
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
                    message = f"its process ended with code {worker.exitcode}; out of memory? try a smaller --jobs"
                    progress.end(cell, message)
                    if queue:
                        start_worker()
                    continue
                if kind == "round":
                    progress.round(cell, content)
                elif kind == "bug":
                    raise RuntimeError(f"{cell}: {content}")
                else:
                    del busy[connection]
                    progress.end(cell, content)
                    give(connection)
    finally:
        for worker in workers.values():
            worker.terminate()  # idle, or stopped between two commits of its round: either way nothing is lost
        for worker in workers.values():
            worker.join()


def _work(connection: Connection, threads: int) -> None:
    """A worker process: receives cells until None; sends ("round", number), ("end", failure or None), ("bug", text)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # fewer where OMP_NUM_THREADS says so
    while (task := connection.recv()) is not None:
        text, path = task
        try:
            recipe = parse_recipe(yaml.safe_load(text))
            _run_cell(recipe, path, lambda number: connection.send(("round", number)))
        except UserError as error:
            connection.send(("end", str(error)))
        except Exception:
            connection.send(("bug", traceback.format_exc()))
        else:
            connection.send(("end", None))


def _end_with_parent() -> None:
    """No worker outlives a killed parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
