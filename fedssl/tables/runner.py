"""Run a table cell by cell, here or in worker processes, and continue it where it was stopped.

Each cell is a run in OUTPUT/ROW/[SCENARIO/]seed-N/. The README lists the files that are written beside them.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import yaml

from ..data.datasets import load_dataset
from ..data.digests import data_digests
from ..data.partitions import deal
from ..engines import engine_of
from ..engines.observers import Observer
from ..engines.progress import format_duration
from ..engines.workers import end_with_parent, worker_pool
from ..errors import UserError, memory_sentence
from ..export.encoder_folder import export_encoder, is_encoder_folder
from ..federation import require_same_data
from ..interrupts import interrupts_ignored
from ..recipe.changes import differences
from ..recipe.overrides import read_values
from ..recipe.reading import load_stored_recipe, parse_recipe
from ..recipe.recipe import Recipe
from ..run_folder.directory import MetricRow, RunDirectory
from ..run_folder.record import read_run
from ..untrusted import own_parts, quoted
from .files import Note, format_table, write_description, write_results
from .results import JUDGED, read_results, verdict
from .table import Table, cell_path, cell_recipe, encoder_path


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a table, with the labels of the row and the scenario in `label` and the run's folder in `path`.

    `oracle` is the folder of the run whose encoder it aligns to, if there is one.
    """

    label: str
    seed: int
    recipe: Recipe
    path: Path
    oracle: Path | None = None

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def begun(self) -> bool:
        """Return whether the run's folder exists."""
        return (self.path / "recipe.yaml").is_file()

    @property
    def finished(self) -> bool:
        """Return whether the last round of the run is committed."""
        return self.begun and RunDirectory.open(self.path).checkpoint.finished


def table_cells(table: Table, output: Path, overrides: Sequence[str] = ()) -> list[Cell]:
    """Return all cells, seed by seed, so that a stopped table compares all rows; those with an oracle run last."""
    return [
        Cell(
            f"{row.label}, {scenario.label}" if scenario.label else row.label,
            seed,
            cell_recipe(table, row, seed, overrides, scenario, output),
            cell_path(output, row.label, seed, scenario.label),
            cell_path(output, row.oracle, seed, scenario.label) if row.oracle is not None else None,
        )
        for seed in table.seeds
        for scenario in table.all_scenarios
        for row in table.rows
    ]


def check_output(name: str, output: Path, cells: Sequence[Cell]) -> None:
    """Raise UserError unless an output folder is new, empty, or the same table's, and its cells have these recipes."""
    stored = output / "table.yaml"
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder as the table's output")
    if output.is_dir() and any(output.iterdir()) and not stored.is_file():
        raise UserError(f"{output} is not empty and holds no table.yaml: name a new folder as the table's output")
    if stored.is_file() and (other := read_values(stored, "table").get("name")) != name:
        raise UserError(f"{output} holds the table {other}, and not {name}: name another output")
    for cell in cells:
        if cell.begun:
            _check_recipe(cell)


_WITHOUT_EFFECT = (
    *("description", "clients_parallel", "evaluation.patience", "model.digests"),
    *("data.download", "data.memory_limit", "data.follow_links"),
)


def _check_recipe(cell: Cell) -> None:
    """Raise if a key that affects results differs from the stored run's.

    An option that is missing in the stored recipe was added later; the run used its default.
    """
    directory = RunDirectory.open(cell.path)
    wanted_parts = own_parts(cell.recipe.model_dump(mode="json"))
    known = set(own_parts(read_values(directory.path / "recipe.yaml"))) <= set(wanted_parts)
    recipe = load_stored_recipe(directory, trust=known, resuming=True)
    for key, (stored, wanted) in differences(recipe, cell.recipe).items():
        matters = not key.startswith(_WITHOUT_EFFECT)
        # the table's folder decides an oracle, and a run records a teacher's digest and width, and percentiles
        is_found = key.endswith((".oracle", ".teacher_digest", ".teacher_features"))
        is_found |= key.startswith("data.window") and cell.recipe.data.window == "percentiles"
        if matters and not is_found:
            raise UserError(
                f"{cell.path} was made with {key}={stored}, now it is {wanted}: "
                "name another output, or remove that folder"
            )


def _require_same_data(cells: Sequence[Cell]) -> None:
    """Raise UserError if data have changed since cells began. One cell a data set tells, as every call compares it."""
    begun = {cell.recipe.data.model_dump_json(): cell for cell in reversed(cells) if cell.begun}
    for cell in begun.values():
        dataset = load_dataset(cell.recipe.data, cell.recipe.seed)
        require_same_data(cell.path, data_digests(dataset, deal(dataset, cell.recipe.partition, cell.recipe.seed)))


_SECONDS_BETWEEN_NOTES = 30.0
#: (k, n): every n-th cell of a table from the k-th on, counted from 1
Part = tuple[int, int]
ALL: Part = (1, 1)


class Progress:
    """Tells a line when a cell ends, and one now and then while none does; `failures` holds the error messages."""

    def __init__(self, note: Callable[[str], None], cells: int, waiting: int):
        """`note` is called with each line; `cells` is the table's number of cells, `waiting` how many are to be run."""
        self.note, self.cells, self.waiting = note, cells, waiting
        self.failures: dict[Cell, str] = {}
        self.ended = 0
        self.started = self.last_note = time.monotonic()

    def round_done(self, cell: Cell, round_number: int) -> None:
        """Handle a committed round of a cell."""
        if time.monotonic() - self.last_note >= _SECONDS_BETWEEN_NOTES:
            self._tell(f"{cell}: round {round_number} of {cell.recipe.rounds}")

    def cell_ended(self, cell: Cell, failure: str | None = None) -> None:
        """Handle the end of a cell, with an error message if it failed."""
        self.ended += 1
        left = (self.waiting - self.ended) * (time.monotonic() - self.started) / self.ended
        time_left = f"; {format_duration(left)} left" if self.ended < self.waiting else ""
        if failure is None:
            run = read_run(cell.path)
            values = ((metric, run.evaluated(metric, "after")) for metric in JUDGED)
            state = ", ".join(f"{metric} {value:.1f}" for metric, value in values if value is not None)
        else:
            self.failures[cell] = failure
            state = f"failed: {failure}"
        self._tell(f"{self.cells - self.waiting + self.ended}/{self.cells}  {cell}: {state}{time_left}")

    def _tell(self, text: str) -> None:
        self.last_note = time.monotonic()
        self.note(text)


class _Rounds(Observer):
    """Calls a function with the number of each committed round."""

    def __init__(self, round_committed: Callable[[int], None]):
        self.round_committed = round_committed

    def round_ended(self, number: int, rows: Sequence[MetricRow]) -> None:
        self.round_committed(number)


def _run(recipe: str, path: Path, round_committed: Callable[[int], None] = lambda number: None) -> str | None:
    """Run a cell, or continue it where it was stopped; return the message of a UserError, or that memory is wanting.

    The recipe is given as text, because a part from the user's own file cannot be pickled for a worker process.
    """
    try:
        loaded = parse_recipe(yaml.safe_load(recipe))
        engine, rounds, begun = engine_of(loaded), _Rounds(round_committed), (path / "recipe.yaml").is_file()
        checkpoint = (engine.resume(path, rounds) if begun else engine.run(loaded, path, rounds)).checkpoint
    except Exception as error:
        if told := str(error) if isinstance(error, UserError) else memory_sentence(error):
            return told
        raise
    if checkpoint.finished:
        return None
    return (
        f"evaluation.patience ended it after round {checkpoint.round} of {loaded.rounds}, so it has no result: "
        f"fedssl run --resume {quoted(path)} evaluation.patience=null goes on"
    )


def run_here(cells: Sequence[Cell], progress: Progress) -> None:
    """Run cells one after another in this process. A cell that fails is told to `progress`, and the others go on."""
    for cell in cells:
        progress.cell_ended(cell, _run(cell.recipe.to_yaml(), cell.path, partial(progress.round_done, cell)))


def run_in_processes(cells: Sequence[Cell], jobs: int, progress: Progress) -> None:
    """Run cells in worker processes, each of which takes one cell after another.

    Each of the `jobs` processes gets its share of the processor cores as threads, and all have ended when this returns
    or raises. A cell that fails is told to `progress`, and the others go on; if a process ends by itself, all cells
    that were at work fail.

    Raises:
        RuntimeError: an error in a worker that is not a UserError.
    """
    threads, left = max(1, (os.cpu_count() or 1) // jobs), list(cells)
    context = multiprocessing.get_context("spawn")  # a forked child may hang in torch's thread pool
    while left:
        with worker_pool(jobs, context, _begin, threads) as pool:
            left = _run_in(pool, left, jobs, progress)


def _run_in(pool: ProcessPoolExecutor, cells: list[Cell], jobs: int, progress: Progress) -> list[Cell]:
    """Run cells in a pool of `jobs` processes, and return those that are left where one of these has ended."""
    at_work = cells[:jobs]
    with interrupts_ignored():
        running = {pool.submit(_run, cell.recipe.to_yaml(), cell.path): cell for cell in cells}
    while running:
        for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                for cell in at_work:
                    progress.cell_ended(cell, "a worker process ended; was memory short? try a smaller --jobs")
                return [cell for cell in running.values() if cell not in at_work]
            cell = running.pop(future)
            if error is not None:
                raise RuntimeError(f"{cell}: {error!r}") from error
            progress.cell_ended(cell, future.result())
        at_work = [cell for future, cell in running.items() if future.running()][:jobs]  # one more is handed over
        for cell in at_work:
            if cell.begun:
                progress.round_done(cell, RunDirectory.open(cell.path).checkpoint.round)
    return []


def _begin(threads: int) -> None:
    end_with_parent()
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # OMP_NUM_THREADS can ask for fewer


def _has_oracle(cell: Cell, progress: Progress) -> bool:
    """Export the encoder that a cell aligns to, if that is not done; tell `progress` where it cannot be."""
    assert cell.oracle is not None
    encoder = encoder_path(cell.oracle)
    try:
        if not is_encoder_folder(encoder):
            export_encoder(cell.oracle, encoder, trust=True)
    except UserError as error:
        progress.cell_ended(cell, str(error))
        return False
    return True


class CellsFailed(UserError):
    """Some cells of a table failed; the others have run."""


def run_table(
    table: Table,
    output: Path,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    note: Note = lambda text: None,
    part: Part = ALL,
) -> None:
    """Run the cells of a table that are not finished yet, and write its results into `output`.

    All recipes are checked before anything runs. The table can be stopped at any moment; the same call continues it.
    Ctrl-C raises KeyboardInterrupt after the worker processes have ended. A cell that fails does not stop the others.

    `jobs` cells run at a time, see `run_in_processes`. `note` gets each line of progress, then the table and verdict.
    Of a `part` no results are written.

    Raises:
        UserError: a recipe is refused, another one made a cell in `output`, a file cannot be written, or cells failed.
    """
    if part[0] > part[1]:
        raise UserError(f"--part {part[0]} {part[1]}: expected a part of {part[1]}, such as --part 1 {part[1]}")
    cells = table_cells(table, output, overrides)
    check_output(table.name, output, cells)
    _require_same_data(cells)
    write_description(table, output, overrides)
    mine = cells[part[0] - 1 :: part[1]]
    waiting = [cell for cell in mine if not cell.finished]
    note(f"{table.name}: {len(mine)} runs, {len(mine) - len(waiting)} of them finished already; in {output}")
    progress = Progress(note, len(mine), len(waiting))
    run = run_here if jobs == 1 else partial(run_in_processes, jobs=jobs)
    run([cell for cell in waiting if cell.oracle is None], progress=progress)
    run([cell for cell in waiting if cell.oracle is not None and _has_oracle(cell, progress)], progress=progress)
    results = [read_results(table, output, scenario) for scenario in table.all_scenarios]
    if part == ALL and any(scenario.finished for scenario in results):
        write_results(table, results, output)
        shown = [scenario for scenario in results if scenario.finished]
        for scenario in shown:
            parts = (scenario.label, format_table(table, scenario), verdict(table, scenario))
            note("\n" + "\n\n".join(filter(None, parts)))
        pictures = ", ".join(str(output / scenario.picture) for scenario in shown)
        note(f"\npicture: {pictures}\ntable:   {output / 'table.md'}")
    if failures := progress.failures:
        listed = "; ".join(f"{cell}: {failures[cell]}" for cell in cells if cell in failures)
        raise CellsFailed(f"{len(failures)} of {len(mine)} runs failed: {listed}")
