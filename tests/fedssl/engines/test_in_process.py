"""The engine's promises: reproducible, independent clients, and nothing lost when killed at any moment."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedssl import storage
from fedssl.engines.in_process import resume, run
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.reading import parse_recipe
from fedssl.run_directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, tiny_values

METHODS = {
    "local": {},
    "aligned": ALIGNED,
    "averaged": AVERAGED,
    "simsiam": AVERAGED | {"objective": {"name": "simsiam", "output_features": 16, "bottleneck_features": 8}},
    "supervised": AVERAGED | {"objective": "supervised"},
    "public": {"regularizers": [{"name": "public_objective", "batch_size": 16}]},
    "averaged and aligned": {
        "regularizers": ALIGNED["regularizers"],
        "aggregators": ["weighted_mean", "representation_mean"],
        "local_update": "replace",
    },
    "sampled": ALIGNED | {"clients_per_round": 2},
}


def contents(path: Path) -> dict[str, bytes]:
    """Everything that a run leaves, except wall-clock times: timings.csv, its length, and TensorBoard's events."""
    files = [f for f in sorted(path.rglob("*")) if f.is_file() and "tensorboard" not in f.parts]
    found = {str(f.relative_to(path)): f.read_bytes() for f in files if f.name != "timings.csv"}
    manifest = json.loads(found["checkpoints/manifest.json"])
    del manifest["lengths"]["timings.csv"]
    return found | {"checkpoints/manifest.json": json.dumps(manifest).encode()}


def metric(path: Path, name: str, round_number: int) -> dict[str, float]:
    return {who: v for r, who, m, v in RunDirectory.open(path).read_metrics() if m == name and r == round_number}


@pytest.mark.parametrize("kind", METHODS)
def test_two_runs_of_one_recipe_and_seed_are_bit_identical(kind, tiny, tmp_path):
    for name in ("a", "b"):
        run(tiny(**METHODS[kind]), tmp_path / name)
        torch.rand(3)  # what was drawn before must not matter
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert RunDirectory.open(tmp_path / "a").checkpoint.finished


def test_another_seed_gives_another_run(tiny, tmp_path):
    run(tiny(seed=0), tmp_path / "a")
    run(tiny(seed=1), tmp_path / "b")
    assert metric(tmp_path / "a", "loss", 1) != metric(tmp_path / "b", "loss", 1)


def test_the_seed_of_one_client_does_not_depend_on_the_others(tiny, tmp_path):
    """Client 1 alone is the same client whatever its neighbours' architectures are and whether they take part."""
    run(tiny(architectures=["small_convnet"]), tmp_path / "a")
    run(tiny(architectures=["small_resnet10", "small_convnet", "small_convnet_wide"]), tmp_path / "b")
    a, b = (RunDirectory.open(tmp_path / n).client_state(1) for n in "ab")
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    other_a, other_b = (RunDirectory.open(tmp_path / n).client_state(0) for n in "ab")
    assert other_a.tensors.keys() != other_b.tensors.keys()


def test_only_sampled_clients_train_and_the_others_keep_their_state(tiny, tmp_path):
    recipe = tiny(**ALIGNED, clients_per_round=1)
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
    recipe = tiny(**AVERAGED, rounds=1, partition={"name": "dirichlet", "clients": 3, "min_samples": 8, "alpha": 1.0})
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


def test_metrics_hold_evaluation_training_and_traffic(tiny, tmp_path):
    run(tiny(**ALIGNED), tmp_path / "a")
    for name in ("knn", "linear", "effective_rank"):
        for number in (0, 2):
            values = metric(tmp_path / "a", name, number)
            assert values.keys() == {"0", "1", "2", "mean"}
            assert values["mean"] == pytest.approx(sum(values[k] for k in "012") / 3)
    assert metric(tmp_path / "a", "loss", 1).keys() == {"0", "1", "2", "mean"}
    assert 0 < metric(tmp_path / "a", "cka", 1)["mean"] <= 1
    assert metric(tmp_path / "a", "public_effective_rank", 1)["0"] > 1
    # 30 public images, 16 features, 3 clients: 48 columns are more than 30 rows, so the kernel goes down
    assert metric(tmp_path / "a", "bytes_down", 1)["0"] == 30 * 30 * 4
    numbers = len(["samples", "loss", "total_loss", "cka", "public_effective_rank", "memory", "flops"])
    assert metric(tmp_path / "a", "bytes_up", 1)["0"] == 30 * 16 * 4 + 8 * numbers
    with open(tmp_path / "a" / "spectrum.csv") as file:
        values = [float(row["value"]) for row in csv.DictReader(file) if row["client"] == "0"]
    assert values == sorted(values, reverse=True)
    assert list((tmp_path / "a" / "tensorboard").iterdir())


def test_fine_tuning_is_measured_after_training_where_asked(tiny, tmp_path):
    evaluation = {"neighbors": 5, "linear": {"epochs": 1}, "semi_supervised": [0.1, 1]}
    run(tiny(**AVERAGED, rounds=1, evaluation=evaluation), tmp_path / "a")
    found = {m: r for r, _, m, v in RunDirectory.open(tmp_path / "a").read_metrics() if m.startswith("semi_supervised")}
    assert found == {"semi_supervised_0.1": 1, "semi_supervised_1": 1}
    with pytest.raises(
        UserError, match=r"evaluation.semi_supervised.1: input should be less than or equal to 1, got 2"
    ):
        tiny(evaluation={"semi_supervised": [0.1, 2]})


def test_an_existing_folder_is_not_overwritten_unasked(tiny, tmp_path):
    run(tiny(rounds=1), tmp_path / "a")
    before = contents(tmp_path / "a")
    with pytest.raises(UserError, match="exists: continue it with fedssl run --resume"):
        run(tiny(rounds=1, seed=3), tmp_path / "a")
    assert contents(tmp_path / "a") == before
    run(tiny(rounds=1, seed=3), tmp_path / "a", overwrite=True)
    assert contents(tmp_path / "a") != before


def test_bad_input_leaves_nothing_behind(tiny, tmp_path):
    with pytest.raises(UserError):
        run(tiny(training={"batch_size": 5000}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_diverging_client_is_named(tiny, tmp_path):
    with pytest.raises(UserError, match=r"client 0's loss became .* in round 1; lower training.learning_rate"):
        run(tiny(objective="supervised", training={"batch_size": 8, "learning_rate": 1e30}), tmp_path / "a")


# Killed and resumed


def run_in_subprocess(recipe_file: Path, path: Path, resuming: bool) -> subprocess.Popen:
    arguments = ["--resume", str(path)] if resuming else [str(recipe_file), "--output", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedssl", "run", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_killed_at_ten_moments_and_resumed_a_run_ends_bit_identical(tmp_path):
    """SIGKILL at random moments of the wall clock, from the start-up to the end."""
    recipe = parse_recipe(tiny_values(**ALIGNED, rounds=12, clients_per_round=2))
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(recipe.to_yaml())
    undisturbed = run_in_subprocess(recipe_file, tmp_path / "undisturbed", False)
    assert undisturbed.wait() == 0
    chance = random.Random(0)
    kills, path = 0, tmp_path / "killed"
    while kills < 10:
        process = run_in_subprocess(recipe_file, path, resuming=path.exists())
        # wait for the folder, so that the moments fall into the rounds and not into imports
        while not path.exists() and process.poll() is None:
            time.sleep(0.01)
        rounds_before = RunDirectory.open(path).checkpoint.round if path.exists() else -1
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if RunDirectory.open(path).checkpoint.round > rounds_before or chance.random() < 0.002:
                break
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        assert b"fedssl:" not in process.stderr.read()
        kills += 1
    # with the same number of threads as before: another number sums in another order
    assert run_in_subprocess(recipe_file, path, True).wait() == 0
    assert contents(path) == contents(tmp_path / "undisturbed")


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the code under test may catch it."""


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """A finished run of two rounds in which all three clients exchange representations."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run(tiny(**ALIGNED), path)
    return path


# One run makes 61 such calls: 7 for the folder, then for each round the logs, the states, and the manifest.
@pytest.mark.parametrize("victim", [0, 2, 4, 6, 7, 8, 10, 12, 19, 21, 22, 23, 24, 26, 38, 39, 42, 45, 58, 59, 60])
def test_killed_during_any_file_operation_of_a_checkpoint(victim, undisturbed, tiny, tmp_path, monkeypatch):
    """The victim-th flush or rename of the whole run never happens, and what was being written is torn."""
    recipe = tiny(**ALIGNED)
    calls = 0
    real_fsync = os.fsync

    def tear(handle: int) -> None:
        """Leave half of a new file, as where the process died while writing it."""
        if os.readlink(f"/proc/self/fd/{handle}").endswith(".partial"):
            os.ftruncate(handle, os.fstat(handle).st_size // 2)

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
        # a killed process cleans nothing up
        patch.setattr("fedssl.run_directory.shutil.rmtree", lambda *a, **k: None)
        with pytest.raises(Killed):
            run(recipe, tmp_path / "killed")
    if (tmp_path / "killed").exists():
        resume(tmp_path / "killed")
    else:
        run(recipe, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(undisturbed)


def test_a_finished_run_is_left_as_it_is(tiny, tmp_path):
    run(tiny(), tmp_path / "a")
    before = contents(tmp_path / "a")
    resume(tmp_path / "a")
    assert contents(tmp_path / "a") == before


def test_resuming_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"is not a run's folder: it holds no recipe.yaml"):
        resume(tmp_path)


def test_a_damaged_checkpoint_is_told(tiny, tmp_path):
    run(tiny(**AVERAGED, rounds=1), tmp_path / "a")
    directory = RunDirectory.open(tmp_path / "a")
    file = directory.checkpoints / directory.checkpoint.files["server"]
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        directory.server_state()


def test_a_stored_client_that_lacks_a_tensor_is_not_taken(tiny, tmp_path):
    run(tiny(rounds=1), tmp_path / "a")
    state = RunDirectory.open(tmp_path / "a").client_state(0)
    del state.tensors["model/online.projector.0.weight"]
    with pytest.raises(RuntimeError, match=r"online.projector.0.weight"):
        build_federation(tiny(rounds=1)).client(0, state)


def test_a_full_disk_during_a_checkpoint(tmp_path):
    """A real limit on file size in a real process: one line, exit code 2, the last complete round intact."""
    recipe = parse_recipe(tiny_values(**ALIGNED, rounds=3))
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(recipe.to_yaml())
    path = tmp_path / "a"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY));"
        "from fedssl.cli import main; sys.argv = ['fedssl', *sys.argv[1:]]; main()"
    )
    command = [sys.executable, "-c", code, "run", str(recipe_file), "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("fedssl: no space left to write ")
    assert done.stderr.count("\n") == 1
    assert "fedssl run --resume" in done.stderr
    assert not list(path.rglob("*.partial"))
    assert RunDirectory.open(path).checkpoint.round == -1
    run(recipe, tmp_path / "undisturbed")
    resume(path)
    assert contents(path) == contents(tmp_path / "undisturbed")


def test_ctrl_c_ends_cleanly_and_says_how_to_resume(tmp_path):
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(parse_recipe(tiny_values(rounds=200)).to_yaml())
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
