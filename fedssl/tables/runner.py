"""Running a table: cell by cell, here or in worker processes, and continued where it was stopped.

OUTPUT/table.yaml                             the table that was run
OUTPUT/<row's label>/[<scenario>/]seed-<n>/   one run's folder a cell
OUTPUT/table.md, table.html                   the table, with mean, spread and the paper's figures
OUTPUT/summary.csv, table.csv                 the same as data, and every seed's value
OUTPUT/picture.png                            the table as a picture; with scenarios picture-<scenario>.png
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import UserError
from .cells import check_output, table_cells
from .files import format_table, write_description, write_results
from .progress import Progress
from .results import Results, read_results
from .table import Table
from .verdict import verdict
from .workers import run_here, run_in_processes

Note = Callable[[str], None]


def run_table(
    table: Table,
    output: Path,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    note: Note = lambda text: None,
) -> Path:
    """Run the cells of a table that are not finished yet, then write its results into `output`.

    All recipes are checked before anything runs. The table can be stopped at any moment; the same call continues it.
    Ctrl-C raises KeyboardInterrupt after the worker processes have ended. A cell that fails with a UserError does not
    stop the others.

    Args:
        table: of kind `runs`, see `load_table`.
        output: the folder; it is new, empty, or the same table's.
        overrides: `key=value`, for all rows.
        jobs: cells at a time, each in a process of its own with its share of the processor cores as threads.
        note: is called with each line of progress, and in the end with the table and its verdict.

    Returns:
        `output`.

    Raises:
        UserError: a recipe is refused, another recipe has made a cell in `output`, a file cannot be written, or cells
            failed.
    """
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    cells = table_cells(table, output, overrides)
    check_output(output, cells)
    write_description(table, output, overrides)
    waiting = [cell for cell in cells if not cell.finished]
    note(f"{table.name}: {len(cells)} runs, {len(cells) - len(waiting)} of them finished already; in {output}")
    progress = Progress(note, len(cells), len(waiting))
    if jobs == 1:
        run_here(waiting, progress)
    else:
        run_in_processes(waiting, min(jobs, len(waiting)), progress)
    _write_and_tell(table, [read_results(table, output, scenario) for scenario in table.all_scenarios], output, note)
    failures = progress.failures
    if failures:
        listed = "; ".join(f"{cell}: {failures[cell]}" for cell in cells if cell in failures)
        raise UserError(f"{len(failures)} of {len(cells)} runs failed: {listed}")
    return output


def _write_and_tell(table: Table, results: Sequence[Results], output: Path, note: Note) -> None:
    """Write what the finished runs reached, and tell it; nothing where no run is finished."""
    with_runs = [scenario for scenario in results if scenario.finished]
    if not with_runs:
        return
    write_results(table, results, output)
    for scenario in with_runs:
        parts = (scenario.label, format_table(table, scenario), verdict(table, scenario))
        note("\n" + "\n\n".join(part for part in parts if part))
    pictures = ", ".join(str(output / scenario.picture) for scenario in with_runs)
    note(f"\npicture: {pictures}\npage:    {output / 'table.html'}")
