"""Images a second, and the time that the rest of a run will take."""

from __future__ import annotations

from collections import deque
from statistics import fmean

_LAST_ROUNDS = 5  # whose training counts: a schedule's later stages may take longer than its first


class TimeLeft:
    """A run's time left: the rounds take the mean of the last ones, the evaluations that of all before."""

    def __init__(self, rounds: int, evaluations: int):
        self._rounds, self._evaluations = rounds, evaluations
        self._trained: deque[tuple[float, int]] = deque(maxlen=_LAST_ROUNDS)  # seconds and images of rounds
        self._evaluated: list[float] = []  # seconds

    def trained(self, seconds: float, images: int) -> None:
        self._trained.append((seconds, images))
        self._rounds -= 1

    def evaluated(self, seconds: float) -> None:
        self._evaluated.append(seconds)
        self._evaluations -= 1

    def images_per_second(self) -> float | None:
        """Return those of the training, messages included; None if nothing is known yet."""
        seconds, images = (sum(part) for part in zip(*self._trained, strict=True)) if self._trained else (0.0, 0)
        return images / seconds if images and seconds > 0 else None

    def seconds(self) -> float | None:
        """Return the seconds from the last event until the run ends; None if nothing is known yet."""
        if not self._trained:
            return None
        evaluations = self._evaluations * fmean(self._evaluated) if self._evaluated else 0.0
        return self._rounds * fmean(seconds for seconds, _ in self._trained) + evaluations


def format_duration(seconds: float) -> str:
    """Return a duration in its largest fitting unit: "45 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
