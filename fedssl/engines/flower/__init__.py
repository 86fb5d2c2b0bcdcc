"""Engine flower: the same method and the same rounds as in one process, with the clients behind Flower's messages."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The two names that an app folder of an earlier version imports from here, so that it still runs."""
    # imported on use: the commands beside it need neither torch nor Flower's apps, which take seconds
    if name == "make_server_app":
        from .server import make_server_app

        return make_server_app
    if name == "make_client_app":
        from .client import make_client_app

        return make_client_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
