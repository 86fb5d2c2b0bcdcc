"""Runs that die as by SIGKILL, and go on."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.recipe.recipe import Recipe
from fedssl.training import STEP_COSTS


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may catch it."""


class KilledIn(Observer):
    """Dies in a round as soon as so many of its clients have stored their states."""

    def __init__(self, round_number: int, done: int = 1):
        self.moment = (round_number, done)

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if (round_number, position) == self.moment:
            raise Killed


def killed_and_resumed(recipe: Recipe, path: Path, rounds: Sequence[int] = (2,)) -> Path:
    """Run a recipe that dies in each of these rounds, up to its end.

    The process that resumes has counted no step yet.
    """
    for number in rounds:
        with pytest.raises(Killed):
            resume(path, KilledIn(number)) if path.exists() else run(recipe, path, KilledIn(number))
        STEP_COSTS.clear()
    resume(path)
    return path


def contents(path: Path) -> dict[str, bytes]:
    """The states and the metrics that a run left."""
    return {f.name: f.read_bytes() for f in [*(path / "checkpoints").glob("*.safetensors"), path / "metrics.csv"]}
