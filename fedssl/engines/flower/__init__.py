"""Engine flower: the same method and the same rounds as in one process, with the clients behind Flower's messages."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Return `make_server_app` or `make_client_app`, which app folders of earlier versions import from here."""
    # imported on use: the commands beside it need neither torch nor Flower's apps, which take seconds
    module = {"make_server_app": ".server", "make_client_app": ".client"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module, __name__), name)
