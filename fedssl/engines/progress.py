"""Progress bars in the terminal: round, client, loss, images a second and time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..recipe.recipe import Recipe
from ..run_folder.directory import MetricRow
from ..untrusted import printable
from .observers import Observer

_LAST_ROUNDS = 5  # that the time left follows from: a schedule's later stages may take longer than its first


def format_duration(seconds: float) -> str:
    """Return a duration in its largest fitting unit: "45 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class ProgressBars(Observer):
    """Two bars, rounds and the clients of the round; without a terminal, a line a round. A context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):  # seconds
        self.console, self._clock = console, clock
        self._images = 0  # of the round that is in training
        self._images_per_second: float | None = None
        self._evaluation = 0.0  # seconds of the one before training, as long as which the last one takes
        self._ends = deque[float](maxlen=_LAST_ROUNDS + 1)  # of the last rounds, by the clock; first a begin
        self._end: float | None = None  # of the run
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        columns += [_SpeedColumn(), TextColumn("{task.fields[status]}")]
        self.bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self.rounds = self.bars.add_task("rounds", total=None, status="", speed=self._speed)
        self.clients = self.bars.add_task("clients", total=None, status="", speed=str)  # no text

    def __enter__(self) -> ProgressBars:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def run_began(self, recipe: Recipe, path: Path, first_round: int) -> None:
        self.total, self._began = recipe.rounds, self._clock()
        self.bars.update(self.rounds, total=recipe.rounds, completed=max(0, first_round - 1))

    def training_began(self, number: int, images: Sequence[int]) -> None:
        self._images, self._began = sum(images), self._clock()
        if not self._ends:
            self._ends.append(self._began)

    def client_began(self, number: int, client: int, done: int, clients: int) -> None:
        self.bars.update(self.clients, total=clients, completed=done, status=f"client {client}")

    def evaluation_began(self, number: int) -> None:
        self._end_training()
        self._began = self._clock()
        self.bars.update(self.clients, status=f"evaluating after round {number}")

    def round_ended(self, number: int, rows: Sequence[MetricRow]) -> None:
        self._end_training()
        self._tell_end(number)
        means = {metric: value for _, who, metric, value in rows if who in ("mean", "global")}
        status = "  ".join(f"{name} {means[name]:.4g}" for name in ("loss", "cka", "knn", "epsilon") if name in means)
        self.bars.update(self.rounds, completed=number, status=status)
        self.bars.update(self.clients, completed=0, status="")
        if self.bars.disable:
            parts = [f"round {number}/{self.total}", status, self._speed()]
            self.console.print("  ".join(part for part in parts if part), highlight=False)

    def warn(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    inform = warn

    def _end_training(self) -> None:
        if self._images:
            self._images_per_second = self._images / max(self._clock() - self._began, 1e-9)
        self._images = 0

    def _tell_end(self, number: int) -> None:
        """Set when the run ends: its rounds take the mean of the last ones, with the evaluations between them."""
        now = self._clock()
        if number == 0:
            self._evaluation = now - self._began
            return
        self._ends.append(now)
        left = (self.total - number) * (now - self._ends[0]) / max(len(self._ends) - 1, 1)
        self._end = now + left + (self._evaluation if left else 0.0)

    def _speed(self) -> str:
        """Return what is known of the speed and the time left, such as "850 images/s  12 min left"."""
        rate, end = self._images_per_second, self._end  # rich draws the bars in another thread
        parts = [] if rate is None else [f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.1f} images/s"]
        left = 0.0 if end is None else end - self._clock()
        return "  ".join(parts + ([f"{format_duration(left)} left"] if left > 0 else []))


class _SpeedColumn(ProgressColumn):
    """Column that shows what a bar's field `speed` returns."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["speed"]())
