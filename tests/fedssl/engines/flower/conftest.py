"""Fixtures of the Flower engine's tests, which are left out where Flower is not installed (pip install .[flower])."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from fedssl.recipe.reading import parse_recipe
from fedssl.recipe.recipe import Recipe
from tests.fedssl.conftest import tiny_values

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
def quick(monkeypatch) -> Callable[..., Recipe]:
    """The tiny recipe under engine flower, with Flower's privacy if asked for, whose server waits without waiting."""
    from fedssl.engines.flower import messenger, registration
    from tests.fedssl.engines.flower.loop_grid import Clock

    clock = Clock()
    monkeypatch.setattr(messenger, "time", clock)
    monkeypatch.setattr(registration, "time", clock)

    def build(*, dp: dict | None = None, secure: dict | None = None, **changes) -> Recipe:
        options = WAITS | {"differential_privacy": dp, "secure_aggregation": secure}
        return parse_recipe(tiny_values(**changes, engine="flower", flower=options))

    return build
