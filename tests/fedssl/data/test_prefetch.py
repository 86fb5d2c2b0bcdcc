"""Items arrive in order, each made once, and the one that was started is made in the other thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedssl.data.batches import Prefetch


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "other") as executor:
        yield executor


def in_thread(items: range, fails_at: int | None = None) -> Iterator[tuple[int, bool]]:
    """Each item, and whether another thread than the main one has made it."""
    for item in items:
        if item == fails_at:
            raise OSError("unreadable")
        yield item, threading.current_thread() is not threading.main_thread()


def test_items_that_were_started_are_made_in_the_other_thread(executor):
    ahead = Prefetch(in_thread(range(5)))
    got = []
    for item in ahead:
        got.append(item)
        ahead.start(executor if item[0] in (1, 2) else None)
    assert got == [(0, False), (1, False), (2, True), (3, True), (4, False)]


def test_starting_twice_leaves_nothing_out(executor):
    ahead = Prefetch(in_thread(range(3)))
    ahead.start(executor)
    ahead.start(executor)
    assert list(ahead) == [(0, True), (1, False), (2, False)]


def test_it_ends_where_nothing_is_left_to_start(executor):
    ahead = Prefetch(in_thread(range(1)))
    assert next(ahead) == (0, False)
    ahead.start(executor)
    assert list(ahead) == []


def test_an_error_is_raised_at_its_item(executor):
    ahead = Prefetch(in_thread(range(3), fails_at=1))
    assert next(ahead) == (0, False)
    ahead.start(executor)
    with pytest.raises(OSError, match="unreadable"):
        next(ahead)
