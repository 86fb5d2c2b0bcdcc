"""Observers of a run: objects that are called as it goes on, such as progress bars and loggers."""

import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ..errors import UserError
from ..parts import load_file, only_class
from ..recipe.recipe import Recipe
from ..run_folder.directory import MetricRow
from ..run_folder.storage import make_folder, writing
from ..untrusted import expand_home

_LONGEST = 400  # characters of an observer's error that are shown


class Observer:
    """Base of all observers. Its methods do nothing; a subclass defines those that it needs.

    A round is committed before `round_ended` is called, so an observer cannot lose or change it. An exception that a
    method raises stops the run and reaches its caller; a resumed run continues after the last committed round, for
    which `round_ended` is not called again. Everything is called in one thread of the process that runs the rounds.
    """

    def run_began(self, recipe: Recipe, path: Path, first_round: int) -> None:
        """Handle the start of a run in the folder `path`; `first_round` is 0, or the round at which it resumes."""

    def training_began(self, number: int, images: Sequence[int]) -> None:
        """Handle the start of the training of round `number`, from 1.

        `images` are those that each client trains on, in order, counted once for each pass; 0 if unknown.
        """

    def client_began(self, number: int, client: int, done: int, clients: int) -> None:
        """Handle the start of a client's part in a round, of whose `clients` clients `done` have finished."""

    def evaluation_began(self, number: int) -> None:
        """Handle the start of the evaluation after a round's training."""

    def round_ended(self, number: int, rows: Sequence[MetricRow]) -> None:
        """Handle a committed round; `rows` are its rows of metrics.csv, as (round, client, metric, value)."""

    def inform(self, text: str) -> None:
        """Handle a sentence about what the run does: at the start of a new one, or where it ends before its rounds."""

    def warn(self, text: str) -> None:
        """Handle a warning, such as about a client whose answer was left out."""

    def run_ended(self, finished: bool) -> None:
        """Handle the end of a run whose `run_began` has returned; `finished` is false if it was stopped or failed."""


class Observers(Observer):
    """Several observers as one. Each is called in order; if one raises, those after it miss that call alone."""

    def __init__(self, observers: Iterable[Observer]):
        self._observers = list(observers)
        self._begun: list[Observer] = []

    def run_began(self, recipe: Recipe, path: Path, first_round: int) -> None:
        try:
            for observer in self._observers:
                observer.run_began(recipe, path, first_round)
                self._begun.append(observer)
        except BaseException:
            self.run_ended(False)
            raise

    def run_ended(self, finished: bool) -> None:
        """End each that has begun, even if another one raises."""
        with ExitStack() as stack:
            while self._begun:
                stack.callback(self._begun.pop().run_ended, finished)


def _told_to_all(method: str) -> Callable[..., None]:
    def tell(self: Observers, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, method)(*arguments)

    return tell


for _method in ("training_began", "client_began", "evaluation_began", "round_ended", "inform", "warn"):
    setattr(Observers, _method, _told_to_all(_method))


class TensorBoard(Observer):
    """Writes the metrics as TensorBoard events; those of rounds that a resumed run repeats are marked as superseded."""

    def run_began(self, recipe: Recipe, path: Path, first_round: int) -> None:
        self._path = path / "tensorboard"
        make_folder(self._path, within_run=True)
        name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        with writing(self._path):
            self._file = open(self._path / name, "xb")  # noqa: SIM115 - until the run ends
        self._add(file_version="brain.Event:2")
        self._add(step=first_round, session_log=SessionLog(status=SessionLog.START))

    def round_ended(self, number: int, rows: Sequence[MetricRow]) -> None:
        # One event for all values of a round: with a hundred clients, an event each takes as long as some clients.
        values = [Summary.Value(tag=f"{metric}/{who}", simple_value=value) for _, who, metric, value in rows]
        self._add(step=number, summary=Summary(value=values))

    def run_ended(self, finished: bool) -> None:
        with suppress(OSError):  # a write has raised it already, and the events are no part of a checkpoint
            self._file.close()

    def _add(self, **fields: Any) -> None:
        with writing(self._path):
            RecordWriter(self._file).write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._file.flush()


def load_observer(path: Path) -> Observer:
    """Run a .py file and return an object of the one Observer subclass in it, made without arguments.

    An exception of its methods, such as of a server that is down, becomes a UserError that names the file and the line.
    """
    if path.suffix != ".py" or not expand_home(path).is_file():
        raise UserError(f"an observer is an existing .py file with one subclass of fedssl.Observer, got {path}")
    kind = only_class(load_file(path), Observer, str(path))
    try:
        observer = kind()
    except Exception as error:
        raise UserError(f"{path}: {kind.__name__}() failed: {type(error).__name__}: {error}") from error
    for name in vars(Observer):
        if not name.startswith("_"):
            object.__setattr__(observer, name, _named(getattr(observer, name), path))  # it may be a frozen data class
    return observer


def _named(method: Callable[..., None], path: Path) -> Callable[..., None]:
    def call(*arguments: Any, **named: Any) -> None:
        try:
            method(*arguments, **named)
        except Exception as error:  # a logger's library raises errors of its own types
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f" in line {frame.lineno}" for frame in frames if Path(frame.filename).name == path.name]
            problem = f"failed{(lines or [''])[-1]}: {type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
            raise UserError(
                f"the observer {path}, {method.__name__} {problem}; finished rounds are kept: correct the observer or "
                "leave it out, and continue with fedssl run --resume RUN"
            ) from error

    return call
