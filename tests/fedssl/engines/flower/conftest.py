"""Fixtures of the Flower engine's tests, which are left out where Flower is not installed (pip install .[flower])."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedssl.recipe.reading import parse_recipe
from fedssl.recipe.recipe import Recipe
from tests.fedssl.conftest import tiny_values

if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]

WAITS = {"round_seconds": 100, "connect_seconds": 10}


@pytest.fixture(autouse=True)
def flower_process() -> None:
    """Flower notes in its processes who they are, and asks for it when a message is made."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class Clock:
    """Stands for the module `time`: waiting takes no time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def quick(monkeypatch) -> Callable[..., Recipe]:
    """The tiny recipe under engine flower, with Flower's privacy if asked for, whose server waits without waiting."""
    from fedssl.engines.flower import messenger, registration

    clock = Clock()
    monkeypatch.setattr(messenger, "time", clock)
    monkeypatch.setattr(registration, "time", clock)

    def build(*, dp: dict | None = None, secure: dict | None = None, flower: dict | None = None, **changes) -> Recipe:
        options = WAITS | {"differential_privacy": dp, "secure_aggregation": secure} | (flower or {})
        return parse_recipe(tiny_values(**changes, engine="flower", flower=options))

    return build


@pytest.fixture
def begin(quick, tmp_path, monkeypatch) -> Callable[..., Any]:
    """Begin a run of `quick` in a folder, as a LoopRun: its nodes are simulated, or have the files `sites`."""
    from fedssl.engines.flower.site_files import MANIFEST, VARIABLE
    from tests.fedssl.engines.flower.loop_grid import LoopRun

    monkeypatch.setenv(VARIABLE, str(tmp_path / MANIFEST))

    def begun(sites: list[Path] | None = None, folder: str = "run", **changes) -> LoopRun:
        return LoopRun(quick(**changes), tmp_path / folder, sites)

    return begun
