"""Batches arrive in order and no further ahead than asked; an error arrives at its batch."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from fedssl.data.batches import device_batches, read_ahead

IMAGES = torch.arange(40, dtype=torch.uint8).reshape(10, 1, 2, 2)
BATCHES = [torch.tensor(rows) for rows in ([3, 1], [0, 9], [5, 5], [2, 4], [7, 6])]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_on_the_cpu_batches_are_the_images_of_their_rows():
    got = list(device_batches(IMAGES, iter(BATCHES), torch.device("cpu")))
    assert [rows.tolist() for rows, _ in got] == [rows.tolist() for rows in BATCHES]
    assert all(torch.equal(images, IMAGES[rows]) for rows, images in got)


@pytest.mark.parametrize("ahead", [0, 1, 2, 20])
def test_reading_ahead_keeps_the_order(ahead):
    got = list(read_ahead(lambda rows: IMAGES[rows], iter(BATCHES), ahead))
    assert [rows.tolist() for rows, _ in got] == [rows.tolist() for rows in BATCHES]
    assert all(torch.equal(images, IMAGES[rows]) for rows, images in got)
    assert threads() == []


def test_no_more_batches_are_read_than_asked_for():
    read: list[list[int]] = []

    def remember(rows: torch.Tensor) -> torch.Tensor:
        read.append(rows.tolist())
        return IMAGES[rows]

    batches = read_ahead(remember, iter(BATCHES), 2)
    next(batches)
    for _ in range(200):
        if len(read) == 3:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert read == [rows.tolist() for rows in BATCHES[:3]]
    batches.close()
    assert threads() == []


def test_an_error_is_raised_at_its_batch():
    def fail_on_five(rows: torch.Tensor) -> torch.Tensor:
        if 5 in rows.tolist():
            raise OSError("unreadable")
        return IMAGES[rows]

    batches = read_ahead(fail_on_five, iter(BATCHES), 2)
    assert [next(batches)[0].tolist() for _ in range(2)] == [[3, 1], [0, 9]]
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    assert threads() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_on_a_gpu_batches_are_the_same_whether_all_images_fit_or_not(share, monkeypatch):
    monkeypatch.setattr("fedssl.data.batches.RESIDENT_SHARE", share)
    got = list(device_batches(IMAGES, iter(BATCHES), torch.device("cuda")))
    assert all(images.is_cuda and torch.equal(images.cpu(), IMAGES[rows]) for rows, images in got)
