"""Partial participation: who is sampled, who answers, and whose answer counts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.method import Method
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.short_runs import SMALL, contents, metric
from tests.fedssl.killed_runs import killed_and_resumed

MANY = {
    "data": {"name": "digits", "test_limit": 20},
    "partition": {"name": "dirichlet_equal", "clients": 100, "alpha": 0.5, "min_samples": 8},
    "clients_per_round": 25,
}


def clients_with(path: Path, name: str, number: int = 1) -> list[int]:
    return [int(who) for who in metric(path, name, number) if who != "mean"]


def all_ones(clients: list[int]) -> dict[str, float]:
    return {str(k): 1.0 for k in clients}


def test_clients_drop_out_with_their_probability_by_their_own_draw(tiny):
    federation = build_federation(tiny(**AVERAGED, **MANY, client_dropout=0.25))
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
    assert metric(path, "dropped", 1) == all_ones([absent])
    assert directory.client_rounds.get(absent, 0) == 0
    assert metric(path, "refused", 1) == all_ones([refused])
    assert clients_with(path, "bytes_down") == sampled
    assert clients_with(path, "bytes_up") == clients_with(path, "loss") == counted
    losses = metric(path, "loss", 1)
    assert losses["mean"] == pytest.approx(sum(losses[str(k)] for k in counted) / 2)


def test_a_run_with_dropout_is_reproducible_and_resumes(tiny, tmp_path):
    recipe = tiny(**AVERAGED, **MANY | {"clients_per_round": 8}, client_dropout=0.3)
    stored = run(recipe, tmp_path / "a").client_rounds
    assert contents(killed_and_resumed(recipe, tmp_path / "b")) == contents(tmp_path / "a")
    federation, answered = build_federation(recipe), set[int]()
    for number in (1, 2):
        sampled = federation.sampled_clients(number)
        answering = federation.answering_clients(number, sampled)
        assert 0 < len(answering) < 8
        answered |= set(answering)
        assert clients_with(tmp_path / "a", "bytes_up", number) == answering
        assert clients_with(tmp_path / "a", "bytes_down", number) == sampled
    assert stored.keys() == answered


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
