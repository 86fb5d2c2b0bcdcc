"""Fixtures of the Flower engine's tests, which are left out where Flower is not installed (pip install .[flower])."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from fedssl.recipe.reading import parse_recipe
from fedssl.recipe.recipe import Recipe
from tests.fedssl.conftest import tiny_values

if TYPE_CHECKING:
    from tests.fedssl.engines.flower.deployment import Deployment

if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]

WAITS = {"round_seconds": 100, "connect_seconds": 10}


@pytest.fixture
def flower_process() -> None:
    """Flower notes in its processes who they are, and asks for it when a message is made."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


@pytest.fixture(autouse=True)
def _flower_process(flower_process) -> None:
    """For all tests of this folder."""


@pytest.fixture
def no_waiting(monkeypatch) -> None:
    """The server's waits take no time."""
    from fedssl.engines.flower import messenger, registration
    from tests.fedssl.engines.flower.loop_grid import Clock

    clock = Clock()
    monkeypatch.setattr(messenger, "time", clock)
    monkeypatch.setattr(registration, "time", clock)


@pytest.fixture(scope="session")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    """A SuperLink and three sites, which serve all end-to-end tests: starting them takes longer than a run.

    Where nginx is installed, a reverse proxy is between them.
    """
    from tests.fedssl.engines.flower.deployment import Deployment

    started = Deployment(tmp_path_factory.mktemp("deployment"), reverse_proxy=shutil.which("nginx") is not None)
    try:
        started.start_superlink()
        started.register("site0", "site1", "site2")
        for k in range(3):
            started.start_node(k)
        yield started
    finally:
        started.close()


@pytest.fixture
def quick(tiny, no_waiting) -> Callable[..., Recipe]:
    """The tiny recipe under engine flower, whose server waits without waiting."""
    return lambda **changes: tiny(**({"engine": "flower", "flower": WAITS} | changes))


@pytest.fixture
def private(no_waiting) -> Callable[..., Recipe]:
    """The tiny recipe with Flower's privacy, whose server waits without waiting."""

    def build(*, dp: dict | None = None, secure: dict | None = None, **changes) -> Recipe:
        options = WAITS | {"differential_privacy": dp, "secure_aggregation": secure}
        return parse_recipe(tiny_values(**changes, engine="flower", flower=options))

    return build
