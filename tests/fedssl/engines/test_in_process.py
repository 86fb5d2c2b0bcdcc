"""The engine's promises: reproducible, independent clients, who answers, and nothing lost when killed at any moment."""

import math
import os
from pathlib import Path

import pytest
import torch

from fedssl.engines.in_process import resume, run
from fedssl.federation import build_federation
from fedssl.method import Method
from fedssl.run_folder import storage
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.storage import read_csv
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.short_runs import SMALL, SMALL_ALIGNED, contents, metric
from tests.fedssl.killed_runs import Killed, KilledIn

METHODS = {
    "local": SMALL,
    "aligned": ALIGNED | SMALL,
    "public": SMALL | {"regularizers": [{"name": "public_objective", "batch_size": 16}]},
    "averaged and aligned": SMALL
    | {
        "regularizers": ALIGNED["regularizers"],
        "aggregators": ["weighted_mean", "representation_mean"],
        "local_update": "replace",
    },
}


@pytest.fixture
def undisturbed(finished, tiny) -> Path:
    """A finished run of two rounds."""
    return finished(tiny(**SMALL_ALIGNED))


@pytest.mark.parametrize("kind", METHODS)
def test_a_second_run_that_is_stopped_within_a_round_ends_bit_identical(kind, finished, tiny, tmp_path):
    """Recipes that remember more, and other precisions, are killed in test_shipped_recipes.py."""
    torch.rand(3)  # what was drawn before must not matter
    with pytest.raises(Killed):
        run(tiny(**METHODS[kind]), tmp_path / "stopped", KilledIn(2))
    stopped = RunDirectory.open(tmp_path / "stopped")
    assert stopped.checkpoint.round == 1
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
    for name, number in (("knn", 0), ("linear", 2), ("effective_rank", 2), ("loss", 1)):
        values = metric(undisturbed, name, number)
        assert values.keys() == {"0", "1", "2", "mean"}
        assert values["mean"] == pytest.approx(sum(values[k] for k in "012") / 3)
    assert 0 < metric(undisturbed, "cka", 1)["mean"] <= 1
    # 20 public images, 16 features, 3 clients: 48 columns are more than 20 rows, so the kernel goes down
    assert metric(undisturbed, "bytes_down", 1)["0"] == 20 * 20 * 4
    numbers = len(["samples", "loss", "total_loss", "cka", "public_effective_rank", "gradient_norm", "memory", "flops"])
    assert metric(undisturbed, "bytes_up", 1)["0"] == 20 * 16 * 4 + 8 * numbers
    spectrum = [float(row["value"]) for row in read_csv(undisturbed / "spectrum.csv") if row["client"] == "0"]
    assert spectrum == sorted(spectrum, reverse=True)


# Partial participation: who is sampled, who answers, and whose answer counts


def clients_with(path: Path, name: str, number: int = 1) -> list[int]:
    return [int(who) for who in metric(path, name, number) if who != "mean"]


def test_clients_drop_out_with_their_probability_by_their_own_draw(tiny):
    many = {"data": {"name": "digits"}, "partition": {"name": "iid", "clients": 100}, "clients_per_round": 25}
    federation = build_federation(tiny(**AVERAGED, **many, client_dropout=0.25))
    sampled = {number: federation.sampled_clients(number) for number in range(1, 101)}
    answering = {number: federation.answering_clients(number, chosen) for number, chosen in sampled.items()}
    assert all(set(answering[number]) <= set(chosen) for number, chosen in sampled.items())
    assert len(set(map(tuple, sampled.values()))) == len(set(map(tuple, answering.values()))) == 100
    everybody = list(range(100))
    assert federation.answering_clients(1, everybody) != federation.answering_clients(2, everybody)
    share = sum(map(len, answering.values())) / 2500
    assert share == pytest.approx(0.75, abs=0.03)  # three standard deviations
    # a client's draw does not depend on who else was sampled
    assert all(federation.answering_clients(1, [k]) == [k] * (k in answering[1]) for k in sampled[1])


@pytest.mark.parametrize("kind", [AVERAGED, ALIGNED], ids=["averaged", "aligned"])
def test_answers_are_those_that_came_and_were_accepted(kind, tiny, tmp_path, monkeypatch):
    """Of five clients four are sampled, one drops out and one is refused: each wrong count is another number."""
    settings = kind | {"rounds": 1, "partition": {"name": "iid", "clients": 5}, "clients_per_round": 4}
    for seed in range(100):
        recipe = tiny(**settings, evaluation=SMALL["evaluation"], client_dropout=0.3, seed=seed)
        federation = build_federation(recipe)
        sampled = federation.sampled_clients(1)
        answering = federation.answering_clients(1, sampled)
        if len(answering) == 3:
            break
    refused, *counted = answering
    real = Method.client_round

    def client_round(method, client, received, number):
        reply = real(method, client, received, number)
        if client.index == refused:
            reply.tensors[next(iter(reply.tensors))].view(-1)[0] = math.nan
            reply.metrics["loss"] = 1e9  # it would stand out in a mean
        return reply

    monkeypatch.setattr(Method, "client_round", client_round)
    directory = run(recipe, tmp_path / "run")
    path, (absent,) = directory.path, set(sampled) - {refused, *counted}
    assert metric(path, "answers", 1) == {"global": 2.0}
    assert metric(path, "dropped", 1) == {str(absent): 1.0}
    assert directory.client_rounds.get(absent, 0) == 0
    assert metric(path, "refused", 1) == {str(refused): 1.0}
    assert clients_with(path, "bytes_down") == sampled
    assert clients_with(path, "bytes_up") == clients_with(path, "loss") == counted
    losses = metric(path, "loss", 1)
    assert losses["mean"] == pytest.approx(sum(losses[str(k)] for k in counted) / 2)


@pytest.mark.parametrize("kind", [AVERAGED, ALIGNED], ids=["averaged", "aligned"])
def test_a_round_in_which_nobody_answers_changes_nothing(tiny, tmp_path, kind):
    recipe = tiny(**kind | SMALL, clients_per_round=1, client_dropout=0.9, rounds=3)
    federation = build_federation(recipe)
    assert not any(federation.answering_clients(n, federation.sampled_clients(n)) for n in (1, 2, 3))
    directory = run(recipe, tmp_path / "a")
    first = federation.method.initial_state()
    server = directory.server_state()
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in first.tensors.items())
    assert metric(tmp_path / "a", "answers", 3) == {"global": 0.0}
    assert metric(tmp_path / "a", "loss", 3) == {}
    assert RunDirectory.open(tmp_path / "a").checkpoint.finished


# Killed and resumed


# One run makes 58 such calls: 13 for the folder, then for each round the clients' states, the logs, the server's state,
# the flushes of all states, and the manifest.
@pytest.mark.parametrize("victim", [2, 11, 16, 22, 28, 38, 57])
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
