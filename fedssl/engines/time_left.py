"""Images a second, and the time that the rest of a run will take.

Rich's own estimate weighs all rounds alike: its mean error over simulated runs with evaluations and stages of growing
cost is about twice that of `TimeLeft`, and of a resumed run it knows nothing at first.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from ..run_folder.directory import RunDirectory
from ..run_folder.storage import read_csv

_LAST_ROUNDS = 5  # whose training counts: a schedule's later stages may take longer than its first


class TimeLeft:
    """Images a second, and the seconds until the run ends, its evaluations included; call `start` first.

    The estimate uses the training of the last rounds, with the clients of the running round that are done, and the last
    evaluation of each kind: those before and after training measure more than those between them. What this process has
    not measured yet is taken from the earlier rounds of a resumed run, or from the other kind of evaluation.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock  # returns seconds
        self._images: Sequence[int] | None = None  # of the round that is in training, by client in order
        self._clients_done, self._clients_done_at = 0, 0.0
        self._evaluating: int | None = None  # the round
        self._finished: deque[tuple[float, int]] = deque(maxlen=_LAST_ROUNDS)  # seconds and images of rounds
        self._images_are_known = True
        self._evaluation_seconds: dict[bool, float] = {}  # of the last one; true: before or after all training

    def start(self, first_round: int, rounds: int, evaluated: Collection[int], past: Mapping[int, float]) -> None:
        """Begin or continue a run; `evaluated` are the rounds with an evaluation, `past` the seconds of past ones."""
        self._rounds = rounds
        self._evaluated = [number for number in evaluated if number >= first_round]  # whose evaluation has not begun
        self._not_begun = rounds - max(first_round, 1) + 1  # rounds whose training has not begun
        rounds_before = sorted(number for number in past if number)
        # seconds of a round without an evaluation, and of one with it
        self._past_training = _mean([past[number] for number in rounds_before if number not in evaluated])
        self._past_with_evaluation = _mean([past[number] for number in rounds_before if number in evaluated])
        self._past_round_0 = past.get(0)
        self._round_began = self._clock()

    def training(self, number: int, images: Sequence[int]) -> None:
        """Begin the training of a round; see `Observer.training_began`."""
        self._images_are_known = sum(images) > 0 or not images
        self._images = images if self._images_are_known else [1] * len(images)
        self._clients_done = 0
        self._not_begun = self._rounds - number

    def clients_done(self, count: int) -> None:
        """Note that so many clients of the round have finished."""
        self._clients_done, self._clients_done_at = count, self._clock()

    def evaluating(self, number: int) -> None:
        """End a round's training and begin its evaluation."""
        self._evaluation_began, self._evaluating = self._end_training(), number
        self._evaluated = [other for other in self._evaluated if other != number]

    def round_done(self) -> None:
        self._round_began = self._end_training()
        if self._evaluating is not None:
            at_an_end = self._evaluating in (0, self._rounds)
            self._evaluation_seconds[at_an_end] = self._round_began - self._evaluation_began
        self._evaluating = None

    def images_per_second(self) -> float | None:
        """Return those of the training, messages included; None if nothing is known yet."""
        seconds, images = self._measured()
        return images / seconds if self._images_are_known and images and seconds > 0 else None

    def seconds(self) -> float | None:
        """Return the seconds from the last event until the run ends; None if nothing is known yet."""
        training = self._training_left()
        if training is None:
            return None
        evaluation = sum(self._evaluation_estimate(number) for number in self._evaluated)
        if self._evaluating is not None:
            passed = self._clock() - self._evaluation_began
            evaluation += max(0.0, self._evaluation_estimate(self._evaluating) - passed)
        return training + evaluation

    def _end_training(self) -> float:
        """Return the time now, after counting a round that was in training as finished."""
        now = self._clock()
        if self._images is not None:
            self._finished.append((now - self._round_began, sum(self._images)))
        self._images = None
        return now

    def _measured(self) -> tuple[float, int]:
        """Return seconds of training and images in them: of the last rounds, and of the clients done in this one."""
        seconds = sum(each for each, _ in self._finished)
        images = sum(each for _, each in self._finished)
        if self._images is not None and self._clients_done:
            seconds += self._clients_done_at - self._round_began
            images += sum(self._images[: self._clients_done])
        return seconds, images

    def _training_left(self) -> float | None:
        running = self._images is not None
        if not (running or self._not_begun):
            return 0.0
        seconds, images = self._measured()
        if images:
            left = sum((self._images or [])[self._clients_done :])
            return seconds / images * (left + self._not_begun * self._images_of_a_round())
        round_seconds = self._past_with_evaluation if self._past_training is None else self._past_training
        return None if round_seconds is None else round_seconds * (self._not_begun + running)

    def _images_of_a_round(self) -> float:
        """Return the mean of the known rounds; clients that are drawn hold more images in one round than another."""
        known = [images for _, images in self._finished]
        return statistics.fmean([*known, sum(self._images)] if self._images is not None else known)

    def _evaluation_estimate(self, number: int) -> float:
        at_an_end = number in (0, self._rounds)
        for kind in (at_an_end, not at_an_end):
            past = self._past_round_0 if kind else self._past_evaluation()
            seconds = self._evaluation_seconds.get(kind, past)
            if seconds is not None:
                return seconds
        return 0.0

    def _past_evaluation(self) -> float | None:
        """Return the seconds by which earlier rounds with an evaluation took longer than the training of a round."""
        both, training = self._past_with_evaluation, self._past_training
        if both is None:
            return None
        if training is None:
            seconds, images = self._measured()
            training = seconds / images * self._images_of_a_round() if images else both
        return max(0.0, both - training)


def _mean(seconds: list[float]) -> float | None:
    return statistics.fmean(seconds[-_LAST_ROUNDS:]) if seconds else None


def past_seconds(directory: RunDirectory) -> dict[int, float]:
    """Return the seconds of a run's committed rounds, by number; none if timings.csv cannot be read."""
    try:
        rows = read_csv(directory.path / "timings.csv", directory.checkpoint.lengths.get("timings.csv"))
        seconds = {int(row["round"]): float(row["seconds"]) for row in rows}
    except (OSError, ValueError, KeyError):
        return {}
    return {number: value for number, value in seconds.items() if math.isfinite(value) and value >= 0}


def format_duration(seconds: float) -> str:
    """Return a duration in its largest fitting unit: "45 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
