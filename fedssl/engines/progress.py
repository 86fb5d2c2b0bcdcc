"""Progress bars in the terminal: round, client, loss, images a second and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from ..untrusted import printable
from .time_left import TimeLeft, format_duration


class Progress(Protocol):
    """What an engine reports while it runs; the command line draws bars from it.

    `TimeLeft` explains the arguments of `start` and `training`. In `client`, `position` is how many of the round's
    clients are done.
    """

    def start(self, first_round: int, rounds: int, evaluated: Collection[int], past: Mapping[int, float]) -> None: ...
    def training(self, round_number: int, images: Sequence[int]) -> None: ...
    def client(self, round_number: int, index: int, position: int, clients: int) -> None: ...
    def evaluating(self, round_number: int) -> None: ...
    def round_done(self, round_number: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Silent:
    """No progress."""

    def start(self, first_round: int, rounds: int, evaluated: Collection[int], past: Mapping[int, float]) -> None: ...
    def training(self, round_number: int, images: Sequence[int]) -> None: ...
    def client(self, round_number: int, index: int, position: int, clients: int) -> None: ...
    def evaluating(self, round_number: int) -> None: ...
    def round_done(self, round_number: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class ProgressBars:
    """Two bars, rounds and the clients of the round; without a terminal, a line a round. A context manager."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        """`clock` returns the time in seconds, from which the speed and the time left are computed."""
        self.console, self._clock = console, clock
        self._time_left = TimeLeft(clock)
        self._rate: float | None = None  # images a second
        self._end: float | None = None  # when the run will end, by the clock
        self.bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _SpeedColumn(self._speed),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.rounds = self.bars.add_task("rounds", total=None, status="", shows_speed=True)
        self.clients = self.bars.add_task("clients", total=None, status="", shows_speed=False)
        self.total = 0

    def __enter__(self) -> ProgressBars:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def start(self, first_round: int, rounds: int, evaluated: Collection[int], past: Mapping[int, float]) -> None:
        self._time_left.start(first_round, rounds, evaluated, past)
        self._update_speed()
        self.total = rounds
        self.bars.update(self.rounds, total=rounds, completed=max(0, first_round - 1))

    def training(self, round_number: int, images: Sequence[int]) -> None:
        self._time_left.training(round_number, images)
        self._update_speed()

    def client(self, round_number: int, index: int, position: int, clients: int) -> None:
        self._time_left.clients_done(position)
        self._update_speed()
        self.bars.update(self.clients, total=clients, completed=position, status=f"client {index}")

    def evaluating(self, round_number: int) -> None:
        self._time_left.evaluating(round_number)
        self._update_speed()
        self.note(f"evaluating after round {round_number}")

    def round_done(self, round_number: int, metrics: dict[str, float]) -> None:
        self._time_left.round_done()
        self._update_speed()
        status = "  ".join(
            f"{name} {metrics[name]:.4g}" for name in ("loss", "cka", "knn", "epsilon") if name in metrics
        )
        self.bars.update(self.rounds, completed=round_number, status=status)
        self.bars.update(self.clients, completed=0, status="")
        if self.bars.disable:
            parts = [f"round {round_number}/{self.total}", status, self._speed()]
            self.console.print("  ".join(part for part in parts if part), highlight=False)

    def note(self, text: str) -> None:
        self.bars.update(self.clients, status=text)

    def warn(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False)

    def _update_speed(self) -> None:
        left = self._time_left.seconds()
        self._rate, self._end = self._time_left.images_per_second(), None if left is None else self._clock() + left

    def _speed(self) -> str:
        """Images a second and the time left, as far as they are known, such as "850 images/s  12 min left"."""
        rate, end = self._rate, self._end  # the bars are drawn by a thread of their own
        parts = [] if rate is None else [f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.1f} images/s"]
        left = 0.0 if end is None else end - self._clock()
        return "  ".join(parts + ([f"{format_duration(left)} left"] if left > 0 else []))


class _SpeedColumn(ProgressColumn):
    """The run's speed and time left, beside the bar of the rounds alone."""

    def __init__(self, speed: Callable[[], str]):
        super().__init__()
        self._speed = speed

    def render(self, task: Task) -> Text:
        return Text(self._speed() if task.fields["shows_speed"] else "")
