"""Batches arrive in order and no further ahead than asked, in whichever thread; an error arrives at its batch."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fedssl.data.batches import device_batches, read_ahead

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
