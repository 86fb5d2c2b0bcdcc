"""Progress bars in the terminal: round, client, loss and time left."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from ..untrusted.printable import printable


class Progress(Protocol):
    """What an engine reports while it runs; the command line draws bars from it."""

    def start(self, first_round: int, rounds: int) -> None: ...
    def client(self, round_number: int, index: int, position: int, clients: int) -> None: ...
    def round_done(self, round_number: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Silent:
    """No progress."""

    def start(self, first_round: int, rounds: int) -> None: ...
    def client(self, round_number: int, index: int, position: int, clients: int) -> None: ...
    def round_done(self, round_number: int, metrics: dict[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class ProgressBars:
    """Two bars, rounds and the clients of the round; without a terminal, a line a round. A context manager."""

    def __init__(self, console: Console):
        self.console = console
        self.bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.rounds = self.bars.add_task("rounds", total=None, status="")
        self.clients = self.bars.add_task("clients", total=None, status="")
        self.total = 0

    def __enter__(self) -> ProgressBars:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def start(self, first_round: int, rounds: int) -> None:
        self.total = rounds
        self.bars.update(self.rounds, total=rounds, completed=max(0, first_round - 1))

    def client(self, round_number: int, index: int, position: int, clients: int) -> None:
        self.bars.update(self.clients, total=clients, completed=position, status=f"client {index}")

    def round_done(self, round_number: int, metrics: dict[str, float]) -> None:
        status = "  ".join(f"{name} {metrics[name]:.4g}" for name in ("loss", "cka", "knn") if name in metrics)
        self.bars.update(self.rounds, completed=round_number, status=status)
        self.bars.update(self.clients, completed=0, status="")
        if self.bars.disable:
            self.console.print(f"round {round_number}/{self.total}  {status}", highlight=False)

    def note(self, text: str) -> None:
        self.bars.update(self.clients, status=text)

    def warn(self, text: str) -> None:
        self.console.print(printable(text), highlight=False, markup=False)
