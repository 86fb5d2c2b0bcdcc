"""Which phase of a round the time of a live run goes to, measured from outside: fedssl holds no code for it.

The functions that make up a phase are wrapped while a run is measured. A function that is called within another phase
belongs to that phase, as a regularizer's own views do; only a network's passes over public images are "forward"
wherever they are made. What no phase covers is "other".
"""

import functools
import importlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedssl.engines.observers import Observer
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import MetricRow

OTHER = "other"
PHASES = (
    *("augment", "forward", "backward", "optimizer", "EMA", "regularizer"),
    *("send", "aggregate", "evaluate", "checkpoint", OTHER),
)


@dataclass(frozen=True)
class Place:
    """A function of a phase, which every round calls.

    Attributes:
        phase: one of `PHASES`.
        path: where the function is looked up when it is called, as MODULE:NAME or MODULE:CLASS.NAME.
        returns_function: whether what it returns is a function of the same phase, such as a regularizer's term.
        interrupts: phases within which its time is its own phase's nevertheless. A round need not call such a place.
    """

    phase: str
    path: str
    returns_function: bool = False
    interrupts: tuple[str, ...] = ()


def places(recipe: Recipe) -> list[Place]:
    """Every function that is timed in a run of the recipe, in one table.

    Whoever renames one in fedssl changes it here; until then `timed_places` or `require_calls` refuses to measure.
    """
    optimizer = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[recipe.training.optimizer]
    directory = "fedssl.run_folder.directory:RunDirectory"
    return [
        # drawing the views, or waiting until another thread has drawn them
        Place("augment", "fedssl.client:LocalRound.views"),
        Place("augment", "fedssl.data.batches:Prefetch.__next__"),
        Place("forward", f"{_path(recipe.objective)}.step"),
        # a regularizer's pass over public images, and that for the kernel or the factor which a client sends
        Place("forward", "fedssl.models.model:Model.represent", interrupts=("regularizer", "send")),
        Place("backward", "torch:Tensor.backward"),
        Place("optimizer", f"torch.optim:{optimizer}.step"),
        Place("EMA", f"{_path(recipe.objective)}.after_step"),
        *(
            Place("regularizer", path, returns_function=True)
            for path in dict.fromkeys(f"{_path(term)}.start_round" for term in recipe.regularizers)
        ),
        # messages: made, copied and received; and a client's model, which they are loaded into
        Place("send", "fedssl.method:Method.broadcast"),
        Place("send", f"{_path(recipe.local_update)}.receive"),
        Place("send", "fedssl.method:Method._reply"),
        Place("send", "fedssl.federation:Federation.client"),
        Place("send", "fedssl.federation:Federation.state_in_place"),
        Place("aggregate", "fedssl.method:Method.aggregate"),
        Place("evaluate", "fedssl.engines.rounds:_evaluate"),
        Place("checkpoint", f"{directory}.client_state"),
        Place("checkpoint", f"{directory}.write_client"),
        Place("checkpoint", f"{directory}.server_state"),
        Place("checkpoint", f"{directory}.append_metrics"),
        Place("checkpoint", f"{directory}.append_timing"),
        Place("checkpoint", f"{directory}.commit"),
    ]


@dataclass
class PhaseClock:
    """Seconds of each phase, and calls of each place, since the last `take`.

    Attributes:
        device: is synchronised around each phase where it is a GPU.
        clock: returns the time in seconds.
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _current: str | None = None  # the phase that the time counts for
    _since: float = 0.0

    @contextmanager
    def phase(self, name: str, interrupts: tuple[str, ...] = ()) -> Iterator[None]:
        """The time of the block counts for a phase, unless it is within another one that it does not interrupt."""
        outer = self._current
        if outer is not None and outer not in interrupts:
            yield
            return
        self._change_to(name)
        try:
            yield
        finally:
            self._change_to(outer)

    def _change_to(self, phase: str | None) -> None:
        self._synchronize()
        now = self.clock()
        if self._current is not None:
            self._seconds[self._current] += now - self._since
        self._current, self._since = phase, now

    def timed(self, place: Place, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the time of its calls counted."""

        @functools.wraps(function)  # also what torch has noted on an optimiser's step
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._calls[place.path] += 1
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)  # while the main thread does something else, which is timed
            with self.phase(place.phase, place.interrupts):
                result = function(*args, **kwargs)
            return self.timed(Place(place.phase, f"{place.path}()"), result) if place.returns_function else result

        return wrapper

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds by phase and calls by place; both begin anew."""
        taken = dict(self._seconds), dict(self._calls)
        self._seconds.clear()
        self._calls.clear()
        return taken

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def timed_places(timed: Sequence[Place], clock: PhaseClock) -> Iterator[None]:
    """Time the places while the block runs.

    Raises:
        LookupError: a place does not exist; the message names it.
    """
    before: list[tuple[Any, str, Any]] = []  # owner, name, and what the owner itself held, if anything
    try:
        for place in timed:
            owner, name = _owner(place)
            before.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, clock.timed(place, getattr(owner, name)))
        yield
    finally:
        for owner, name, own in reversed(before):
            if own is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, own)


def require_calls(timed: Sequence[Place], calls: dict[str, int]) -> None:
    """Raise a LookupError for a place that a round should have called and did not: its time would be missing."""
    for place in timed:
        if not place.interrupts and not calls.get(place.path):
            raise LookupError(
                f"{place.path} was not called in a round, so the time of {place.phase!r} is unknown: correct `places` "
                "in benchmarks/phases.py"
            )


@dataclass(frozen=True)
class Round:
    """One measured round.

    Attributes:
        number: from 1.
        images: that all clients trained on, counted once for each pass.
        seconds: from the end of the round before it to its own.
        phases: seconds of each of `PHASES`; empty where phases are not measured.
    """

    number: int
    images: int
    seconds: float
    phases: dict[str, float]


class EnoughRounds(Exception):
    """Ends a run whose last round is not of interest."""


class RoundRecorder(Observer):
    """A run's progress that keeps the measured rounds: all but the first one, which warms up, until `last`."""

    def __init__(self, last: int, timed: Sequence[Place] = (), clock: PhaseClock | None = None):
        self.rounds: list[Round] = []
        self._last, self._timed, self._clock = last, timed, clock
        self._images = 0
        self._began = time.perf_counter()

    def training_began(self, round_number: int, images: Sequence[int]) -> None:
        self._images = sum(images)

    def round_ended(self, round_number: int, rows: Sequence[MetricRow]) -> None:
        now = time.perf_counter()
        seconds, phases = now - self._began, {}
        if self._clock is not None:
            measured, calls = self._clock.take()
            if round_number:
                require_calls(self._timed, calls)
            phases = {phase: measured.get(phase, 0.0) for phase in PHASES}
            phases[OTHER] = seconds - sum(measured.values())
        if round_number > 1:
            self.rounds.append(Round(round_number, self._images, seconds, phases))
        if round_number == self._last:
            raise EnoughRounds
        self._began = time.perf_counter()


def _path(part: object) -> str:
    return f"{type(part).__module__}:{type(part).__qualname__}"


def _owner(place: Place) -> tuple[Any, str]:
    """The module or class that a place's function is looked up in, and the function's name."""
    module, _, names = place.path.partition(":")
    *classes, name = names.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for one in classes:
            owner = getattr(owner, one)
        if not callable(getattr(owner, name)):
            raise AttributeError(name)
    except (ImportError, AttributeError) as error:
        raise LookupError(
            f"{place.path}, which the phase {place.phase!r} is timed by, does not exist: correct `places` in "
            "benchmarks/phases.py"
        ) from error
    return owner, name
