"""Data files that tests write and load."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.options import DataOptions
from fedssl.errors import UserError


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def good_arrays() -> dict[str, np.ndarray]:
    return {
        "x_train": random_pixels(12, 6, 8, 3),
        "y_train": np.arange(12) % 3,
        "x_test": random_pixels(5, 6, 8, 3, seed=1),
        "y_test": np.arange(5) % 3,
    }


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def load_npz(path: Path, seed: int = 0, **options: object) -> Dataset:
    return load_dataset(DataOptions(name="npz", path=path, **options), seed)


def refused(says: str, options: DataOptions) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_dataset(options, 0)
    assert "\n" not in str(caught.value)


def write_image(path: Path, value: int, mode: str = "RGB", size: tuple[int, int] = (20, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(path)


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Within it a file that grows larger cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
