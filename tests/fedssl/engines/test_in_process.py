"""The engine's promises: reproducible, independent clients, and nothing lost when killed at any moment."""

from __future__ import annotations

import csv
import os
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from fedssl.engines.in_process import resume, run
from fedssl.errors import UserError
from fedssl.run_folder import storage
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.short_runs import SMALL, contents, metric
from tests.fedssl.forked_command import start_command
from tests.fedssl.killed_runs import Killed, KilledIn

SMALL_ALIGNED = ALIGNED | SMALL | {"architectures": ["small_convnet"]}
METHODS = {
    "local": SMALL,
    "aligned": ALIGNED | SMALL | {"architectures": ["small_convnet", "small_resnet10"]},
    "public": SMALL | {"regularizers": [{"name": "public_objective", "batch_size": 16}]},
    "averaged and aligned": SMALL
    | {
        "regularizers": ALIGNED["regularizers"],
        "aggregators": ["weighted_mean", "representation_mean"],
        "local_update": "replace",
    },
    "in memory": AVERAGED | SMALL | {"client_states": "memory"},
}


@pytest.fixture
def undisturbed(finished, tiny) -> Path:
    """A finished run of two rounds in which all three clients exchange representations."""
    return finished(tiny(**SMALL_ALIGNED))


def test_two_runs_of_one_recipe_and_seed_are_bit_identical(undisturbed, tiny, tmp_path):
    torch.rand(3)  # what was drawn before must not matter
    run(tiny(**SMALL_ALIGNED), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(undisturbed)


@pytest.mark.parametrize("kind", METHODS)
def test_a_second_run_that_is_stopped_within_a_round_ends_bit_identical(kind, finished, tiny, tmp_path):
    """Recipes that remember more, and other precisions, are killed in test_shipped_recipes.py."""
    with pytest.raises(Killed):
        run(tiny(**METHODS[kind]), tmp_path / "stopped", KilledIn(2))
    stopped = RunDirectory.open(tmp_path / "stopped")
    assert stopped.checkpoint.round == 1
    if kind == "in memory":  # the first client's state of round 2 lies there, and nothing points at it
        assert (stopped.checkpoints / "client-0000.round-00002.safetensors").is_file()
        assert stopped.client_rounds == {0: 1, 1: 1, 2: 1}
    assert resume(tmp_path / "stopped").checkpoint.finished
    assert contents(tmp_path / "stopped") == contents(finished(tiny(**METHODS[kind])))


def test_another_seed_gives_another_run(finished, tiny, tmp_path):
    run(tiny(**SMALL, seed=1, rounds=1), tmp_path / "b")
    assert metric(finished(tiny(**SMALL)), "loss", 1) != metric(tmp_path / "b", "loss", 1)


def test_the_seed_of_one_client_does_not_depend_on_the_others(finished, tiny, tmp_path):
    """Client 1 alone is the same client whatever its neighbours' architectures are."""
    run(tiny(**SMALL, architectures=["small_convnet_wide", "small_convnet"]), tmp_path / "b")
    one, other = RunDirectory.open(finished(tiny(**SMALL))), RunDirectory.open(tmp_path / "b")
    a, b = one.client_state(1).tensors, other.client_state(1).tensors
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    of_neighbour, others = (directory.client_state(0).num_bytes for directory in (one, other))
    assert of_neighbour != others


def test_metrics_hold_evaluation_training_and_traffic(undisturbed):
    for name in ("knn", "linear", "effective_rank"):
        for number in (0, 2):
            values = metric(undisturbed, name, number)
            assert values.keys() == {"0", "1", "2", "mean"}
            assert values["mean"] == pytest.approx(sum(values[k] for k in "012") / 3)
    assert metric(undisturbed, "loss", 1).keys() == {"0", "1", "2", "mean"}
    assert 0 < metric(undisturbed, "cka", 1)["mean"] <= 1
    assert metric(undisturbed, "public_effective_rank", 1)["0"] > 1
    # 20 public images, 16 features, 3 clients: 48 columns are more than 20 rows, so the kernel goes down
    assert metric(undisturbed, "bytes_down", 1)["0"] == 20 * 20 * 4
    numbers = len(["samples", "loss", "total_loss", "cka", "public_effective_rank", "memory", "flops"])
    assert metric(undisturbed, "bytes_up", 1)["0"] == 20 * 16 * 4 + 8 * numbers
    with open(undisturbed / "spectrum.csv") as file:
        values = [float(row["value"]) for row in csv.DictReader(file) if row["client"] == "0"]
    assert values == sorted(values, reverse=True)


def test_bad_input_leaves_nothing_behind(tiny, tmp_path):
    with pytest.raises(UserError):
        run(tiny(training={"batch_size": 5000}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# Killed and resumed


@pytest.fixture
def start(tiny, tmp_path) -> Callable[..., ForkServerProcess]:
    """Start the command that makes or resumes a run, on one thread."""

    def start(path: Path, largest_file: int | None = None, **changes) -> ForkServerProcess:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(tiny(**SMALL_ALIGNED | changes).to_yaml())
        arguments = ["--resume", str(path)] if path.exists() else [str(recipe), "--output", str(path)]
        return start_command(["run", *arguments], path.with_suffix(".errors"), largest_file)

    return start


def test_killed_at_five_moments_and_resumed_a_run_ends_bit_identical(start, finished, tiny, tmp_path):
    """SIGKILL at random moments of the wall clock, from the start-up to the end."""
    changes = {"rounds": 7, "clients_per_round": 2}
    chance, path = random.Random(0), tmp_path / "killed"
    for _ in range(5):
        process = start(path, **changes)
        # wait for the folder, so that the moments fall into the rounds and not into the start
        while not path.exists() and process.is_alive():
            time.sleep(0.01)
        rounds_before = RunDirectory.open(path).checkpoint.round if path.exists() else -1
        deadline = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < deadline:
            if RunDirectory.open(path).checkpoint.round > rounds_before or chance.random() < 0.002:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.join()
        assert "fedssl:" not in path.with_suffix(".errors").read_text()
    process = start(path, **changes)
    process.join()
    assert process.exitcode == 0, path.with_suffix(".errors").read_text()
    assert contents(path) == contents(finished(tiny(**SMALL_ALIGNED | changes)))


# One run makes 58 such calls: 13 for the folder, then for each round the clients' states, the logs, the server's state,
# the flushes of all states, and the manifest.
@pytest.mark.parametrize("victim", [2, 7, 11, 13, 16, 22, 28, 38, 45, 57])
def test_killed_during_any_file_operation_of_a_checkpoint(victim, undisturbed, tiny, tmp_path, monkeypatch):
    """The victim-th flush or rename of the whole run never happens, and what was being written is torn."""
    recipe = tiny(**SMALL_ALIGNED)
    calls = 0
    real_fsync = os.fsync

    def tear(handle: int) -> None:
        """Leave half of a file that is not on the disk yet, as where the machine stopped while writing it."""
        path = os.readlink(f"/proc/self/fd/{handle}")
        if path.endswith((".partial", ".safetensors")):
            os.truncate(path, os.fstat(handle).st_size // 2)

    def dying(real):
        def operation(*arguments):
            nonlocal calls
            calls += 1
            if calls == victim + 1:
                if real is real_fsync:
                    tear(arguments[0])
                raise Killed
            return real(*arguments)

        return operation

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", dying(os.fsync))
        patch.setattr(storage.os, "replace", dying(os.replace))
        patch.setattr(storage, "_AT_A_TIME", 1)  # so that it is always the same file
        # a killed process cleans nothing up
        patch.setattr("shutil.rmtree", lambda *a, **k: None)
        with pytest.raises(Killed):
            run(recipe, tmp_path / "killed")
    if (tmp_path / "killed").exists():
        resume(tmp_path / "killed")
    else:
        run(recipe, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(undisturbed)


def test_a_finished_run_is_left_as_it_is_and_a_damaged_checkpoint_is_told(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "a")
    directory = resume(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(undisturbed)
    os.truncate(directory.checkpoints / directory.checkpoint.files["server"], 1000)
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        directory.server_state()


def test_a_full_disk_during_a_checkpoint(start, undisturbed, tmp_path):
    """A real limit on file size in a real process: one line, exit code 2, the last complete round intact."""
    path = tmp_path / "a"
    process = start(path, largest_file=50_000)
    process.join()
    told = path.with_suffix(".errors").read_text()
    assert process.exitcode == 2, told
    assert told.startswith("fedssl: no space left to write ")
    assert told.count("\n") == 1
    assert "fedssl run --resume" in told
    assert not list(path.rglob("*.partial"))
    assert RunDirectory.open(path).checkpoint.round == -1
    resume(path)
    assert contents(path) == contents(undisturbed)
