"""Progress bars in the terminal: round, client, loss, images a second and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..recipe.recipe import Recipe
from ..run_folder.directory import MetricRow
from ..untrusted import printable
from .observers import Observer
from .rounds import evaluation_due
from .time_left import TimeLeft, format_duration


class ProgressBars(Observer):
    """Two bars, rounds and the clients of the round; without a terminal, a line a round. A context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):  # seconds
        self.console, self._clock = console, clock
        self._images: int | None = None  # of the round that is in training
        self._images_per_second: float | None = None
        self._end: float | None = None  # when the run will end, by the clock
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
        self.total = recipe.rounds
        self._evaluated = [number for number in range(first_round, recipe.rounds + 1) if evaluation_due(recipe, number)]
        self._time_left = TimeLeft(recipe.rounds - max(first_round, 1) + 1, len(self._evaluated))
        self._update_speed()
        self.bars.update(self.rounds, total=recipe.rounds, completed=max(0, first_round - 1))

    def training_began(self, number: int, images: Sequence[int]) -> None:
        self._images, self._began = sum(images), self._clock()

    def client_began(self, number: int, client: int, done: int, clients: int) -> None:
        self.bars.update(self.clients, total=clients, completed=done, status=f"client {client}")

    def evaluation_began(self, number: int) -> None:
        self._end_training()
        self._began = self._clock()
        self.note(f"evaluating after round {number}")

    def round_ended(self, number: int, rows: Sequence[MetricRow]) -> None:
        if number in self._evaluated:
            self._time_left.evaluated(self._clock() - self._began)
        self._end_training()
        means = {metric: value for _, who, metric, value in rows if who in ("mean", "global")}
        status = "  ".join(f"{name} {means[name]:.4g}" for name in ("loss", "cka", "knn", "epsilon") if name in means)
        self.bars.update(self.rounds, completed=number, status=status)
        self.bars.update(self.clients, completed=0, status="")
        if self.bars.disable:
            parts = [f"round {number}/{self.total}", status, self._speed()]
            self.console.print("  ".join(part for part in parts if part), highlight=False)

    def note(self, text: str) -> None:
        """Show a text beside the bar of the clients until the next client begins."""
        self.bars.update(self.clients, status=text)

    def inform(self, text: str) -> None:
        self.warn(text)

    def warn(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False)

    def _end_training(self) -> None:
        if self._images is not None:
            self._time_left.trained(self._clock() - self._began, self._images)
        self._images = None
        self._update_speed()

    def _update_speed(self) -> None:
        left = self._time_left.seconds()
        self._images_per_second = self._time_left.images_per_second()
        self._end = None if left is None else self._clock() + left

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
