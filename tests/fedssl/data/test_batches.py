"""Batches arrive in order and no further ahead than asked, in whichever thread; an error arrives at its batch."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fedssl.data.batches import Prefetch, device_batches, read_ahead

IMAGES = torch.arange(40, dtype=torch.uint8).reshape(10, 1, 2, 2)
BATCHES = [torch.tensor(rows) for rows in ([3, 1], [0, 9], [5, 5], [2, 4], [7, 6])]


def assert_in_order(got: Iterable[tuple[Tensor, Tensor]]) -> None:
    for (rows, images), expected in zip(got, BATCHES, strict=True):
        assert rows.tolist() == expected.tolist()
        assert torch.equal(images.cpu(), IMAGES[expected])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.mark.parametrize("ahead", [0, 1, 2, 20])
def test_batches_are_the_images_of_their_rows(ahead):
    assert_in_order(device_batches(IMAGES, iter(BATCHES), torch.device("cpu")))
    assert_in_order(read_ahead(lambda rows: IMAGES[rows], iter(BATCHES), ahead))
    assert threads() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_on_a_gpu_batches_are_the_same_whether_all_images_fit_or_not(share, monkeypatch):
    monkeypatch.setattr("fedssl.data.batches.RESIDENT_SHARE", share)
    got = list(device_batches(IMAGES, iter(BATCHES), torch.device("cuda")))
    assert all(images.is_cuda for _, images in got)
    assert_in_order(got)


def test_no_more_batches_are_read_than_asked_for():
    upcoming = iter(BATCHES)
    batches = read_ahead(lambda rows: IMAGES[rows], upcoming, 2)
    next(batches)
    assert len(list(upcoming)) == len(BATCHES) - 3
    batches.close()
    assert threads() == []


def test_an_error_of_reading_ahead_is_raised_at_its_batch():
    def fail_on_five(rows: Tensor) -> Tensor:
        if 5 in rows.tolist():
            raise OSError("unreadable")
        return IMAGES[rows]

    batches = read_ahead(fail_on_five, iter(BATCHES), 2)
    assert [next(batches)[0].tolist() for _ in range(2)] == [[3, 1], [0, 9]]
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    assert threads() == []


def in_thread(items: range, fails_at: int | None = None) -> Iterator[tuple[int, bool]]:
    """Each item, and whether another thread than the main one has made it."""
    for item in items:
        if item == fails_at:
            raise OSError("unreadable")
        yield item, threading.current_thread() is not threading.main_thread()


def test_prefetched_items_are_made_once_in_the_other_thread_and_in_order_and_an_error_arrives_at_its_item():
    with ThreadPoolExecutor(1, "other") as executor:
        ahead = Prefetch(in_thread(range(5)))
        got = []
        for item in ahead:
            got.append(item)
            ahead.start(executor if item[0] in (1, 2, 4) else None)  # nothing is left to start after the last one
            ahead.start(executor if item[0] == 2 else None)  # starting twice leaves nothing out
        assert got == [(0, False), (1, False), (2, True), (3, True), (4, False)]
        ahead = Prefetch(in_thread(range(3), fails_at=1))
        assert next(ahead) == (0, False)
        ahead.start(executor)
        with pytest.raises(OSError, match="unreadable"):
            next(ahead)
