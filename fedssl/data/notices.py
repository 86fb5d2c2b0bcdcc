"""What a user should know of the data that is no error: one line each, on stderr where nobody set up `logging`."""

import logging
import sys
import time

_LOGGER = logging.getLogger("fedssl.data")
_SECONDS_BETWEEN_LINES = 10.0


def notify(text: str) -> None:
    """Tell the user; the text is one line."""
    _LOGGER.warning("fedssl: %s", text)


class ProgressLines:
    """How far a long task is: a line on stderr every ten seconds, and none for a short task."""

    def __init__(self, task: str, total: int):
        self._task, self._total = task, total
        self._last = time.monotonic()

    def done(self, count: int) -> None:
        """So many of the task's items are done."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(f"fedssl: {self._task}: {count:,} of {self._total:,}", file=sys.stderr, flush=True)
