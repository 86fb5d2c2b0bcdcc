"""How fast a run trains, and how long the rest of it will take."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from ..run.directory import RunDirectory
from ..run.storage import read_csv

#: the training of so many last rounds counts: a schedule's later stages may take longer than its first
_LAST_ROUNDS = 5


class TimeLeft:
    """Images a second, and the seconds until the run ends, its evaluations included.

    The estimate uses what this process has measured: the training of the last rounds, with the clients of the running
    round that are done, and the last evaluation of each kind. The evaluations before and after training measure more
    than those between them. What has not been measured yet is taken from the earlier rounds of a resumed run, and an
    unknown kind of evaluation is taken to be as long as the other kind.
    """

    def __init__(self, clock: Callable[[], float]):
        """`clock` returns the time in seconds."""
        self._clock = clock
        self._rounds = 0
        self._evaluated: list[int] = []  # rounds whose evaluation has not begun
        self._not_begun = 0  # rounds whose training has not begun
        self._images: Sequence[int] | None = None  # of the round that is in training, by client in order
        self._clients_done = 0
        self._clients_done_at = 0.0
        self._evaluation_began = 0.0
        self._finished: deque[tuple[float, int]] = deque(maxlen=_LAST_ROUNDS)  # seconds and images of rounds
        self._images_are_known = True
        self._evaluation_seconds: dict[bool, float] = {}  # of the last one, by whether it is before or after training
        self._past: dict[str, float] = {}
        self._evaluating: int | None = None
        self._round_began = clock()

    def start(self, first_round: int, rounds: int, evaluated: Collection[int], past: Mapping[int, float]) -> None:
        """A run begins, or continues.

        Args:
            first_round: the number of the first round that is run now.
            rounds: of the whole run; round 0 only evaluates.
            evaluated: numbers of the rounds with an evaluation.
            past: seconds of earlier rounds, by number.
        """
        self._rounds = rounds
        self._evaluated = [number for number in evaluated if number >= first_round]
        self._not_begun = rounds - max(first_round, 1) + 1
        self._past = _past_seconds(past, evaluated)
        self._round_began = self._clock()

    def training(self, number: int, images: Sequence[int]) -> None:
        """A round's training begins.

        Args:
            number: the round, from 1.
            images: that each client trains on, counted once for each pass, in the clients' order; 0 where unknown.
        """
        self._images_are_known = sum(images) > 0 or not images
        self._images = images if self._images_are_known else [1] * len(images)
        self._clients_done = 0
        self._not_begun = self._rounds - number

    def clients_done(self, count: int) -> None:
        """So many clients of the round have finished."""
        self._clients_done = count
        self._clients_done_at = self._clock()

    def evaluating(self, number: int) -> None:
        """The evaluation after a round begins, and its training is over."""
        self._evaluation_began = self._end_training()
        self._evaluating = number
        self._evaluated = [other for other in self._evaluated if other != number]

    def round_done(self) -> None:
        """The round is committed."""
        self._round_began = self._end_training()
        if self._evaluating is not None:
            seconds = self._round_began - self._evaluation_began
            self._evaluation_seconds[self._at_an_end(self._evaluating)] = seconds
        self._evaluating = None

    def images_per_second(self) -> float | None:
        """Of the training, messages included; None where nothing is known yet."""
        seconds, images = self._measured()
        return images / seconds if self._images_are_known and images and seconds > 0 else None

    def seconds(self) -> float | None:
        """From the last event until the run ends; None where nothing is known yet."""
        training = self._training_left()
        if training is None:
            return None
        evaluation = sum(self._evaluation_estimate(number) for number in self._evaluated)
        if self._evaluating is not None:
            passed = self._clock() - self._evaluation_began
            evaluation += max(0.0, self._evaluation_estimate(self._evaluating) - passed)
        return training + evaluation

    def _end_training(self) -> float:
        """The time now; a round that was in training until now is finished."""
        now = self._clock()
        if self._images is not None:
            self._finished.append((now - self._round_began, sum(self._images)))
        self._images = None
        return now

    def _measured(self) -> tuple[float, int]:
        """Seconds of training and images in them: of the last rounds, and of the clients that are done in this one."""
        seconds, images = (sum(values) for values in zip(*self._finished, strict=True)) if self._finished else (0.0, 0)
        if self._images is not None and self._clients_done:
            seconds += self._clients_done_at - self._round_began
            images += sum(self._images[: self._clients_done])
        return seconds, int(images)

    def _training_left(self) -> float | None:
        running = self._images is not None
        if not (running or self._not_begun):
            return 0.0
        seconds, images = self._measured()
        if images:
            left = sum(self._images[self._clients_done :]) if self._images is not None else 0
            return seconds / images * (left + self._not_begun * self._images_of_a_round())
        of_a_round = self._past.get("training", self._past.get("training and evaluation"))
        return None if of_a_round is None else of_a_round * (self._not_begun + running)

    def _images_of_a_round(self) -> float:
        """The mean of the rounds that are known; clients that are drawn hold more images in one round than another."""
        known = [images for _, images in self._finished]
        return statistics.fmean([*known, sum(self._images)] if self._images is not None else known)

    def _evaluation_estimate(self, number: int) -> float:
        at_an_end = self._at_an_end(number)
        for kind in (at_an_end, not at_an_end):
            if kind in self._evaluation_seconds:
                return self._evaluation_seconds[kind]
            past = self._past.get("round 0") if kind else self._past_evaluation()
            if past is not None:
                return past
        return 0.0

    def _past_evaluation(self) -> float | None:
        """Seconds by which earlier rounds with an evaluation took longer than the training of a round."""
        both = self._past.get("training and evaluation")
        if both is None:
            return None
        seconds, images = self._measured()
        measured = seconds / images * self._images_of_a_round() if images else both
        return max(0.0, both - self._past.get("training", measured))

    def _at_an_end(self, number: int) -> bool:
        return number in (0, self._rounds)


def past_seconds(directory: RunDirectory) -> dict[int, float]:
    """Seconds of a run's committed rounds, by number; a file that cannot be read counts as none."""
    try:
        rows = read_csv(directory.path / "timings.csv", directory.checkpoint.lengths.get("timings.csv"))
        seconds = {int(row["round"]): float(row["seconds"]) for row in rows}
    except (OSError, ValueError, KeyError):
        return {}
    return {number: value for number, value in seconds.items() if math.isfinite(value) and value >= 0}


def format_duration(seconds: float) -> str:
    """A duration in its largest fitting unit: "45 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _past_seconds(past: Mapping[int, float], evaluated: Collection[int]) -> dict[str, float]:
    """Mean seconds of the last earlier rounds of each kind."""
    kinds = {
        "training": [past[number] for number in sorted(past) if number and number not in evaluated],
        "training and evaluation": [past[number] for number in sorted(past) if number and number in evaluated],
        "round 0": [past[0]] if 0 in past else [],
    }
    return {kind: statistics.fmean(values[-_LAST_ROUNDS:]) for kind, values in kinds.items() if values}
