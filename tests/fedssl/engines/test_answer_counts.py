"""What a round's metrics say of its clients: who was sent the message, who answered, whose answer counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.method import Method
from fedssl.recipe.recipe import Recipe
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.test_in_process import metric

SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "partition": {"name": "iid", "clients": 5},
    "clients_per_round": 4,
    "client_dropout": 0.3,
}


@dataclass
class OnlyRound:
    """A recipe of one round: of five clients four are sampled, and one of these drops out."""

    recipe: Recipe
    sampled: list[int]
    answering: list[int]

    @property
    def dropped(self) -> list[int]:
        return [k for k in self.sampled if k not in self.answering]


@pytest.fixture
def only_round(tiny):
    def build(**changes: Any) -> OnlyRound:
        for seed in range(100):
            recipe = tiny(**SETTINGS | {"seed": seed} | changes)
            federation = build_federation(recipe)
            sampled = federation.sampled_clients(1)
            answering = federation.answering_clients(1, sampled)
            if len(answering) == 3:
                return OnlyRound(recipe, sampled, answering)
        raise AssertionError("no seed has one client that drops out")

    return build


@pytest.fixture
def broken(monkeypatch) -> set[int]:
    """Clients whose answers hold NaN, and a loss that would stand out in a mean; a test fills the set."""
    real, indices = Method.client_round, set()

    def client_round(method, client, received, number):
        reply = real(method, client, received, number)
        if client.index in indices:
            reply.tensors[next(iter(reply.tensors))].view(-1)[0] = math.nan
            reply.metrics["loss"] = 1e9
        return reply

    monkeypatch.setattr(Method, "client_round", client_round)
    return indices


def all_ones(clients: list[int]) -> dict[str, float]:
    return {str(k): 1.0 for k in clients}


def clients_with(path: Path, name: str) -> list[int]:
    return [int(who) for who in metric(path, name, 1) if who != "mean"]


@pytest.mark.parametrize("kind", [AVERAGED, ALIGNED], ids=["averaged", "aligned"])
def test_answers_are_those_that_came_and_were_accepted(kind, only_round, broken, tmp_path):
    """Four are sampled, one drops out and one is refused, so that each wrong count is another number."""
    the_round = only_round(**kind)
    refused, *counted = the_round.answering
    broken.add(refused)
    run(the_round.recipe, tmp_path / "run")
    assert metric(tmp_path / "run", "answers", 1) == {"global": 2.0}
    assert metric(tmp_path / "run", "dropped", 1) == all_ones(the_round.dropped)
    assert metric(tmp_path / "run", "refused", 1) == all_ones([refused])
    assert clients_with(tmp_path / "run", "bytes_down") == the_round.sampled
    assert clients_with(tmp_path / "run", "bytes_up") == counted


def test_what_a_refused_client_logs_is_in_no_mean(only_round, broken, tmp_path):
    the_round = only_round(**AVERAGED)
    broken.add(the_round.answering[0])
    run(the_round.recipe, tmp_path / "run")
    losses = metric(tmp_path / "run", "loss", 1)
    mean = losses.pop("mean")
    assert list(losses) == [str(k) for k in the_round.answering[1:]]
    assert mean == pytest.approx(sum(losses.values()) / 2)


def test_without_a_refusal_all_that_came_count(only_round, tmp_path):
    the_round = only_round(**AVERAGED)
    run(the_round.recipe, tmp_path / "run")
    assert metric(tmp_path / "run", "answers", 1) == {"global": 3.0}
    assert clients_with(tmp_path / "run", "bytes_up") == the_round.answering


def test_behind_flower_a_client_that_does_not_answer_is_not_counted(only_round, broken, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")
    from flwr.supercore.task_identity import TaskIdentity

    from fedssl.engines.flower import messenger, registration
    from tests.fedssl.engines.flower.loop_grid import Clock, run_on, start

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    clock = Clock()
    monkeypatch.setattr(messenger, "time", clock)
    monkeypatch.setattr(registration, "time", clock)
    the_round = only_round(**AVERAGED, engine="flower", flower={"round_seconds": 100, "connect_seconds": 10})
    refused, counted, silent = the_round.answering
    broken.add(refused)
    directory, grid = start(the_round.recipe, tmp_path / "run")
    grid.silent = {11 + silent}
    run_on(the_round.recipe, directory, grid)
    assert metric(tmp_path / "run", "answers", 1) == {"global": 1.0}
    assert metric(tmp_path / "run", "missing", 1) == all_ones([silent])
    assert metric(tmp_path / "run", "refused", 1) == all_ones([refused])
    assert clients_with(tmp_path / "run", "bytes_up") == [counted]
