"""Randomness that nobody can predict, for Flower's noise and masks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def numpy_seeded_by_system() -> Iterator[None]:
    """Run the body with NumPy's global generator, which Flower draws from, seeded by the operating system.

    The run's seed would not do, as everybody knows it. Nor would the generator as it stands: a node's process is a fork
    of one that has imported NumPy (commands.py), so that every round would draw the same noise.
    """
    before = np.random.get_state()  # noqa: NPY002 - it is what Flower uses
    np.random.seed(np.frombuffer(os.urandom(4 * 624), dtype=np.uint32))  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
