"""The engine's promises: reproducible, independent clients, and nothing lost when killed at any moment."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.recipe.reading import parse_recipe
from fedssl.run_folder import storage
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, tiny_values
from tests.fedssl.forked_command import start_command

#: what makes a run take half the time
SMALL = {
    "data": {"name": "digits", "train_limit": 60, "test_limit": 20, "public_holdout": 20},
    "evaluation": {"neighbors": 3, "linear": {"epochs": 1}},
}
SMALL_ALIGNED = ALIGNED | SMALL | {"architectures": ["small_convnet"]}
METHODS = {
    "local": SMALL,
    "aligned": ALIGNED | SMALL | {"architectures": ["small_convnet", "small_resnet10"]},
    "averaged": AVERAGED | SMALL,
    "simsiam": AVERAGED | SMALL | {"objective": {"name": "simsiam", "output_features": 16, "bottleneck_features": 8}},
    "supervised": AVERAGED | SMALL | {"objective": "supervised"},
    "public": SMALL | {"regularizers": [{"name": "public_objective", "batch_size": 16}]},
    "averaged and aligned": SMALL
    | {
        "regularizers": ALIGNED["regularizers"],
        "aggregators": ["weighted_mean", "representation_mean"],
        "local_update": "replace",
    },
    "sampled": ALIGNED | SMALL | {"clients_per_round": 2},
    "bfloat16": AVERAGED | SMALL | {"training": {"local_epochs": 1, "batch_size": 8, "precision": "bfloat16"}},
    "joined views": AVERAGED | SMALL | {"training": {"local_epochs": 1, "batch_size": 8, "join_views": True}},
}


def contents(path: Path) -> dict[str, bytes]:
    """Everything that a run leaves, except wall-clock times: timings.csv with its traces, and TensorBoard's events."""
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and "tensorboard" not in f.parts]
    found = {str(f.relative_to(path)): f.read_bytes() for f in files if f.name != "timings.csv"}
    manifest = json.loads(found["checkpoints/manifest.json"])
    del manifest["lengths"]["timings.csv"], manifest["digest"]
    return found | {"checkpoints/manifest.json": json.dumps(manifest).encode()}


def metric(path: Path, name: str, round_number: int) -> dict[str, float]:
    return {who: v for r, who, m, v in RunDirectory.open(path).read_metrics() if m == name and r == round_number}


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a finished run by its key in METHODS; each runs once for all tests, which only read it."""
    folder, paths = tmp_path_factory.mktemp("finished"), {}

    def path(kind: str) -> Path:
        if kind not in paths:
            run(tiny(**METHODS[kind]), folder / kind)
            paths[kind] = folder / kind
        return paths[kind]

    return path


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """A finished run of two rounds in which all three clients exchange representations."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run(tiny(**SMALL_ALIGNED), path)
    return path


@pytest.mark.parametrize("kind", METHODS)
def test_two_runs_of_one_recipe_and_seed_are_bit_identical(kind, finished, tiny, tmp_path):
    finished(kind)
    torch.rand(3)  # what was drawn before must not matter
    run(tiny(**METHODS[kind]), tmp_path / "again")
    assert contents(finished(kind)) == contents(tmp_path / "again")
    assert RunDirectory.open(tmp_path / "again").checkpoint.finished


def test_another_seed_gives_another_run(finished, tiny, tmp_path):
    run(tiny(**SMALL, seed=1), tmp_path / "b")
    assert metric(finished("local"), "loss", 1) != metric(tmp_path / "b", "loss", 1)


def test_the_seed_of_one_client_does_not_depend_on_the_others(finished, tiny, tmp_path):
    """Client 1 alone is the same client whatever its neighbours' architectures are and whether they take part."""
    run(tiny(**SMALL, architectures=["small_resnet10", "small_convnet", "small_convnet_wide"]), tmp_path / "b")
    one, other = RunDirectory.open(finished("local")), RunDirectory.open(tmp_path / "b")
    a, b = one.client_state(1), other.client_state(1)
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    assert one.client_state(0).tensors.keys() != other.client_state(0).tensors.keys()


def test_only_sampled_clients_train_and_the_others_keep_their_state(tiny, tmp_path):
    recipe = tiny(**ALIGNED | SMALL, clients_per_round=1)
    federation = build_federation(recipe)
    run(recipe, tmp_path / "a")
    directory = RunDirectory.open(tmp_path / "a")
    took_part = [federation.sampled_clients(n) for n in (1, 2)]
    assert [len(chosen) for chosen in took_part] == [1, 1]
    for k in range(3):
        last = max((n for n, chosen in zip((1, 2), took_part, strict=True) if k in chosen), default=0)
        assert directory.checkpoint.files[f"client-{k:04d}"].endswith(f"round-{last:05d}.safetensors")


def test_averaged_clients_start_from_the_mean_by_samples(tiny, tmp_path):
    """One round, one step each: the global model is the sample-weighted mean of the clients' models."""
    recipe = tiny(
        **AVERAGED | SMALL, rounds=1, partition={"name": "dirichlet", "clients": 3, "min_samples": 8, "alpha": 1.0}
    )
    run(recipe, tmp_path / "a")
    federation, directory = build_federation(recipe), RunDirectory.open(tmp_path / "a")
    sizes = [len(rows) for rows in federation.client_rows]
    assert len(set(sizes)) > 1
    server = directory.server_state()
    for name, mean in server.tensors.items():
        states = [directory.client_state(k).tensors["model/" + name].double() for k in range(3)]
        expected = sum(n * s for n, s in zip(sizes, states, strict=True)) / sum(sizes)
        if mean.is_floating_point():
            torch.testing.assert_close(mean.double(), expected, atol=1e-6, rtol=1e-6)
        else:
            assert mean == expected.round()


def test_metrics_hold_evaluation_training_and_traffic(finished):
    path = finished("aligned")
    for name in ("knn", "linear", "effective_rank"):
        for number in (0, 2):
            values = metric(path, name, number)
            assert values.keys() == {"0", "1", "2", "mean"}
            assert values["mean"] == pytest.approx(sum(values[k] for k in "012") / 3)
    assert metric(path, "loss", 1).keys() == {"0", "1", "2", "mean"}
    assert 0 < metric(path, "cka", 1)["mean"] <= 1
    assert metric(path, "public_effective_rank", 1)["0"] > 1
    # 20 public images, 16 features, 3 clients: 48 columns are more than 20 rows, so the kernel goes down
    assert metric(path, "bytes_down", 1)["0"] == 20 * 20 * 4
    numbers = len(["samples", "loss", "total_loss", "cka", "public_effective_rank", "memory", "flops"])
    assert metric(path, "bytes_up", 1)["0"] == 20 * 16 * 4 + 8 * numbers
    with open(path / "spectrum.csv") as file:
        values = [float(row["value"]) for row in csv.DictReader(file) if row["client"] == "0"]
    assert values == sorted(values, reverse=True)
    assert events(path) == {(r, f"{m}/{who}"): np.float32(v) for r, who, m, v in RunDirectory.open(path).read_metrics()}


def events(path: Path) -> dict[tuple[int, str], float]:
    """The values in a run's TensorBoard events, by round and tag."""
    read = EventAccumulator(str(path / "tensorboard"), {"scalars": 0})
    read.Reload()
    return {(event.step, tag): event.value for tag in read.Tags()["scalars"] for event in read.Scalars(tag)}


def test_fine_tuning_is_measured_after_training_where_asked(tiny, tmp_path):
    evaluation = {"neighbors": 5, "linear": {"epochs": 1}, "semi_supervised": [0.1, 1]}
    run(tiny(**AVERAGED | SMALL | {"evaluation": evaluation}, rounds=1), tmp_path / "a")
    found = {m: r for r, _, m, v in RunDirectory.open(tmp_path / "a").read_metrics() if m.startswith("semi_supervised")}
    assert found == {"semi_supervised_0.1": 1, "semi_supervised_1": 1}
    with pytest.raises(
        UserError, match=r"evaluation.semi_supervised.1: input should be less than or equal to 1, got 2"
    ):
        tiny(evaluation={"semi_supervised": [0.1, 2]})


def test_an_existing_folder_is_not_overwritten_unasked(undisturbed, tiny, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "a")
    before = contents(tmp_path / "a")
    with pytest.raises(UserError, match="exists: continue it with fedssl run --resume"):
        run(tiny(**SMALL, rounds=1, seed=3), tmp_path / "a")
    assert contents(tmp_path / "a") == before
    run(tiny(**SMALL, rounds=1, seed=3), tmp_path / "a", overwrite=True)
    assert contents(tmp_path / "a") != before


def test_bad_input_leaves_nothing_behind(tiny, tmp_path):
    with pytest.raises(UserError):
        run(tiny(training={"batch_size": 5000}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_diverging_client_is_named(tiny, tmp_path):
    with pytest.raises(
        UserError, match=r"client 0's loss became .* in round 1, step \d+; lower training.learning_rate"
    ):
        run(tiny(objective="supervised", training={"batch_size": 8, "learning_rate": 1e30}), tmp_path / "a")


# Killed and resumed


def start_run(recipe_file: Path, path: Path, resuming: bool) -> ForkServerProcess:
    arguments = ["--resume", str(path)] if resuming else [str(recipe_file), "--output", str(path)]
    return start_command(["run", *arguments], path.with_suffix(".errors"))


def finish_run(recipe_file: Path, path: Path, resuming: bool) -> None:
    process = start_run(recipe_file, path, resuming)
    process.join()
    assert process.exitcode == 0, path.with_suffix(".errors").read_text()


def test_killed_at_ten_moments_and_resumed_a_run_ends_bit_identical(tmp_path):
    """SIGKILL at random moments of the wall clock, from the start-up to the end."""
    recipe = parse_recipe(tiny_values(**SMALL_ALIGNED, rounds=12, clients_per_round=2))
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(recipe.to_yaml())
    finish_run(recipe_file, tmp_path / "undisturbed", resuming=False)
    chance = random.Random(0)
    kills, path = 0, tmp_path / "killed"
    while kills < 10:
        process = start_run(recipe_file, path, resuming=path.exists())
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
        kills += 1
    # with the same number of threads as before: another number sums in another order
    finish_run(recipe_file, path, resuming=True)
    assert contents(path) == contents(tmp_path / "undisturbed")


class Stopped(BaseException):
    pass


class StopsInTheSecondRound(Observer):
    """Stops a run when the last client of the second round is about to begin."""

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if round_number == 2 and position == clients - 1:
            raise Stopped


@pytest.mark.parametrize("kind", METHODS)
def test_a_run_that_is_stopped_within_a_round_ends_bit_identical(kind, finished, tiny, tmp_path):
    with pytest.raises(Stopped):
        run(tiny(**METHODS[kind]), tmp_path / "stopped", StopsInTheSecondRound())
    assert RunDirectory.open(tmp_path / "stopped").checkpoint.round == 1
    resume(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(finished(kind))


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may catch it."""


# One run makes 58 such calls: 13 for the folder, then for each round the clients' states, the logs, the server's state,
# the flushes of all states, and the manifest.
@pytest.mark.parametrize(
    "victim", [0, 2, 4, 6, 7, 9, 10, 11, 13, 14, 16, 18, 19, 21, 22, 23, 24, 25, 26, 28, 36, 38, 39, 43, 45, 55, 56, 57]
)
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


def test_a_finished_run_is_left_as_it_is(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "a")
    resume(tmp_path / "a")
    assert contents(tmp_path / "a") == contents(undisturbed)


def test_resuming_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"is not a run's folder: it holds no recipe.yaml"):
        resume(tmp_path)


def test_a_damaged_checkpoint_is_told(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "a")
    directory = RunDirectory.open(tmp_path / "a")
    file = directory.checkpoints / directory.checkpoint.files["server"]
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        directory.server_state()


def test_a_stored_client_that_lacks_a_tensor_is_not_taken(finished, tiny):
    state = RunDirectory.open(finished("local")).client_state(0)
    del state.tensors["model/online.projector.0.weight"]
    with pytest.raises(UserError, match=r"state of client 0 lacks online\.projector\.0\.weight"):
        build_federation(tiny(**METHODS["local"])).client(0, state)


def test_a_full_disk_during_a_checkpoint(undisturbed, tiny, tmp_path):
    """A real limit on file size in a real process: one line, exit code 2, the last complete round intact."""
    recipe_file, path, errors = tmp_path / "recipe.yaml", tmp_path / "a", tmp_path / "errors"
    recipe_file.write_text(tiny(**SMALL_ALIGNED).to_yaml())
    process = start_command(["run", str(recipe_file), "--output", str(path)], errors, largest_file=50_000)
    process.join()
    told = errors.read_text()
    assert process.exitcode == 2, told
    assert told.startswith("fedssl: no space left to write ")
    assert told.count("\n") == 1
    assert "fedssl run --resume" in told
    assert not list(path.rglob("*.partial"))
    assert RunDirectory.open(path).checkpoint.round == -1
    resume(path)
    assert contents(path) == contents(undisturbed)


def test_ctrl_c_ends_cleanly_and_says_how_to_resume(tmp_path):
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(parse_recipe(tiny_values(**SMALL, rounds=200)).to_yaml())
    path = tmp_path / "a"
    command = [sys.executable, "-m", "fedssl", "run", str(recipe_file), "--output", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (path / "timings.csv").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"continue with: fedssl run --resume {path}\n" in output
    assert "Traceback" not in errors
