"""Short runs, what a run leaves in its folder, and ways to stop one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedssl.engines.observers import Observer
from fedssl.run_folder.directory import MetricRow, RunDirectory
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.killed_runs import Killed

#: what makes the tiny recipe's run take half the time
SMALL = {
    "data": {"name": "digits", "train_limit": 60, "test_limit": 20, "public_holdout": 20},
    "evaluation": {"neighbors": 3, "linear": {"epochs": 1}},
}
#: a short run in which all three clients exchange representations
SMALL_ALIGNED = ALIGNED | SMALL | {"architectures": ["small_convnet"]}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def contents(path: Path) -> dict[str, bytes]:
    """Everything that a run leaves, except wall-clock times: timings.csv with its traces, and TensorBoard's events."""
    found = {name: data for name, data in everything(path).items() if not name.startswith("tensorboard/")}
    del found["timings.csv"]
    manifest = json.loads(found["checkpoints/manifest.json"])
    del manifest["digest"]
    for checkpoint in (manifest, *manifest["earlier"]):
        del checkpoint["lengths"]["timings.csv"]
    return found | {"checkpoints/manifest.json": json.dumps(manifest).encode()}


def results(path: Path) -> dict[str, bytes]:
    """What a run leaves, but the recipe and its history, which name the engine and how many clients train at a time."""
    files = contents(path)
    manifest = json.loads(files["checkpoints/manifest.json"])
    for name in ("recipe.yaml", "history.csv"):
        files.pop(name, None), manifest["digests"].pop(name, None)
    return files | {"checkpoints/manifest.json": json.dumps(manifest).encode()}


def metric(path: Path, name: str, round_number: int) -> dict[str, float]:
    return {who: v for r, who, m, v in RunDirectory.open(path).read_metrics() if m == name and r == round_number}


class StopsAfterRoundOne(Observer):
    """Stops a run when its first round is committed."""

    def round_ended(self, round_number: int, rows: list[MetricRow]) -> None:
        if round_number == 1:
            raise Killed


@contextmanager
def stopped_before_commit(number: int) -> Iterator[None]:
    """Let a run stop in the body, when all of a round but its commit is done."""
    commit = RunDirectory.commit

    def commit_or_stop(directory: RunDirectory, round_number: int, *arguments, **keys) -> None:
        if round_number == number:
            raise Killed
        commit(directory, round_number, *arguments, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "commit", commit_or_stop)
        with pytest.raises(Killed):
            yield
