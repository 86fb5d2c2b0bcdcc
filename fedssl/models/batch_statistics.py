"""Forward passes of images that are not a client's own, without a trace in the running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def untouched_running_statistics(network: nn.Module) -> Iterator[None]:
    """Within it, training mode normalises by the batch's statistics and changes no running ones.

    The running statistics are those that evaluation uses. They shall tell of a client's own images alone, whatever else
    passes through its network. Modules in evaluation mode are not affected.
    """
    changed = [m for m in network.modules() if m.training and getattr(m, "track_running_stats", False)]
    for module in changed:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in changed:
            module.track_running_stats = True  # type: ignore[assignment]


@contextmanager
def running_statistics(network: nn.Module) -> Iterator[None]:
    """Within it, the network is in evaluation mode: it normalises by its running statistics and changes none."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
