"""Ctrl-C where it is not heard, or may not be heard at once: in deletions, started processes and a pool's locks."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


def raise_ignored_interrupts() -> None:
    """Raise, a moment later, a KeyboardInterrupt that came while an object was deleted: Python only prints it."""
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _raise_later
        signal.signal(signal.SIGALRM, signal.default_int_handler)


def _raise_later(ignored: Any) -> None:
    if ignored.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(ignored)


@contextmanager
def _handled(handler: signal.Handlers | Callable[[int, FrameType | None], object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone hears it, and can set a handler
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupts_ignored() -> AbstractContextManager[None]:
    """Let processes that are started in the body ignore Ctrl-C: their parent handles it for all."""
    return _handled(signal.SIG_IGN)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Raise Ctrl-C's KeyboardInterrupt after the body.

    Within a pool's submission or its wait for results it can leave half a worker, or a lock that nobody releases.
    """
    heard: list[int] = []
    with _handled(lambda number, frame: heard.append(number)):
        yield
    if heard:
        signal.raise_signal(signal.SIGINT)
