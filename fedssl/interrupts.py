"""Ctrl-C where it may not be heard at once: in processes that are started, and in the middle of a pool's locks."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let processes that are started in the body ignore Ctrl-C: their parent handles it for all."""
    with _handled(signal.SIG_IGN):
        yield


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
