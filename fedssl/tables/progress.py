"""What is told while a table's cells run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..engines.time_left import format_duration
from ..run_record import read_run
from .cells import Cell
from .verdict import JUDGED

_SECONDS_BETWEEN_NOTES = 30.0


class Progress:
    """Tells a line when a cell ends, and one now and then while none does; keeps the failures.

    Attributes:
        failures: the error messages of the cells that failed.
    """

    def __init__(self, note: Callable[[str], None], cells: int, waiting: int):
        """`note` is called with each line; `cells` is the table's number of cells, `waiting` how many are to be run."""
        self.note, self.cells, self.waiting = note, cells, waiting
        self.failures: dict[Cell, str] = {}
        self.ended = 0
        self.started = self.last_note = time.monotonic()

    def round_done(self, cell: Cell, round_number: int) -> None:
        """A round of a cell is committed."""
        if time.monotonic() - self.last_note >= _SECONDS_BETWEEN_NOTES:
            self._tell(f"{cell}: round {round_number} of {cell.recipe.rounds}")

    def cell_ended(self, cell: Cell, failure: str | None = None) -> None:
        """A cell is finished, or has failed with an error message."""
        self.ended += 1
        left = (self.waiting - self.ended) * (time.monotonic() - self.started) / self.ended
        time_left = f"; {format_duration(left)} left" if self.ended < self.waiting else ""
        if failure is None:
            state = _accuracies(cell.path)
        else:
            self.failures[cell] = failure
            state = f"failed: {failure}"
        self._tell(f"{self.cells - self.waiting + self.ended}/{self.cells}  {cell}: {state}{time_left}")

    def _tell(self, text: str) -> None:
        self.last_note = time.monotonic()
        self.note(text)


def _accuracies(path: Path) -> str:
    """A finished run's accuracies in a few words."""
    run = read_run(path)
    values = ((metric, run.evaluated(metric, "after")) for metric in JUDGED)
    return ", ".join(f"{metric} {value:.1f}" for metric, value in values if value is not None)
