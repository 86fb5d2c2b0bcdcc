"""Images a second, and the time that the rest of a run will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from statistics import fmean

_LAST_ROUNDS = 5  # whose training counts: a schedule's later stages may take longer than its first


class TimeLeft:
    """Images a second and the seconds until the run ends, known from the first trained round on; call `start` first.

    The rounds left take the mean of the last ones, the evaluations left that of all before. Rich's own estimate weighs
    all rounds alike, whose mean error is about twice as large where stages grow.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock  # returns seconds
        self._images: int | None = None  # of the round that is in training
        self._trained: deque[tuple[float, int]] = deque(maxlen=_LAST_ROUNDS)  # seconds and images of rounds
        self._evaluated: list[float] = []  # seconds

    def start(self, first_round: int, rounds: int, evaluated: Collection[int]) -> None:
        """Begin or continue a run; `evaluated` are the rounds with an evaluation."""
        self._rounds_left = rounds - max(first_round, 1) + 1
        self._evaluations_left = sum(number >= first_round for number in evaluated)

    def training(self, images: Sequence[int]) -> None:
        """Begin the training of a round; see `Observer.training_began`."""
        self._images, self._began = sum(images), self._clock()

    def evaluating(self) -> None:
        """End a round's training and begin its evaluation."""
        self._end_training()
        self._began = self._clock()

    def round_done(self, evaluated: bool) -> None:
        if evaluated:
            self._evaluated.append(self._clock() - self._began)
            self._evaluations_left -= 1
        self._end_training()

    def images_per_second(self) -> float | None:
        """Return those of the training, messages included; None if nothing is known yet."""
        seconds, images = (sum(part) for part in zip(*self._trained, strict=True)) if self._trained else (0.0, 0)
        return images / seconds if images and seconds > 0 else None

    def seconds(self) -> float | None:
        """Return the seconds from the last event until the run ends; None if nothing is known yet."""
        if not self._trained:
            return None
        training = self._rounds_left * fmean(seconds for seconds, _ in self._trained)
        return training + (self._evaluations_left * fmean(self._evaluated) if self._evaluated else 0.0)

    def _end_training(self) -> None:
        if self._images is not None:
            self._trained.append((self._clock() - self._began, self._images))
            self._rounds_left -= 1
        self._images = None


def format_duration(seconds: float) -> str:
    """Return a duration in its largest fitting unit: "45 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
