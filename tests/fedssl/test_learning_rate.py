"""The learning rate that the optimiser has in each round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.method import Method
from fedssl.training import TrainingOptions, learning_rate
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.rounds_in_memory import train_rounds

RATE = 0.02
#: cos^2(pi (r - 1) / 8), r the round: full at first, half in the middle, and not yet 0 in the last
COSINE_OF_FOUR_ROUNDS = [RATE, RATE * (2 + math.sqrt(2)) / 4, RATE / 2, RATE * (2 - math.sqrt(2)) / 4]
SETTINGS: dict[str, Any] = AVERAGED | {
    "rounds": 4,
    "objective": {"name": "simsiam", "output_features": 8, "bottleneck_features": 4},
    "data": {"name": "digits", "train_limit": 48, "test_limit": 20, "public_holdout": 16},
    "partition": {"name": "iid", "clients": 2},
}


def training(**changes: Any) -> dict[str, Any]:
    return {"local_epochs": 1, "batch_size": 8, "learning_rate": RATE, "learning_rate_schedule": "cosine"} | changes


@pytest.fixture
def rates() -> Iterator[list[set[float]]]:
    """The rates of all optimiser steps; a test adds a set for those that follow."""
    noted: list[set[float]] = [set()]

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        noted[-1].update(float(group["lr"]) for group in optimizer.param_groups)

    handle = register_optimizer_step_pre_hook(note)
    yield noted
    handle.remove()


@pytest.fixture
def rates_by_round(rates, monkeypatch) -> dict[int, set[float]]:
    """The rates of the steps in each round of the clients, not those of evaluation."""
    by_round: dict[int, set[float]] = {}
    real = Method.client_round

    def client_round(method: Method, client: Any, received: Any, number: int) -> Any:
        rates.append(set())
        reply = real(method, client, received, number)
        by_round.setdefault(number, set()).update(rates[-1])
        rates.append(set())
        return reply

    monkeypatch.setattr(Method, "client_round", client_round)
    return by_round


@pytest.mark.parametrize(
    ("optimizer", "schedule", "expected"),
    [
        ("sgd", "cosine", COSINE_OF_FOUR_ROUNDS),
        ("adamw", "cosine", COSINE_OF_FOUR_ROUNDS),
        ("adam", "constant", [RATE] * 4),
    ],
)
def test_a_round_has_the_rate_of_its_number(optimizer, schedule, expected, tiny, rates_by_round):
    options = training(optimizer=optimizer, learning_rate_schedule=schedule)
    train_rounds(build_federation(tiny(**SETTINGS, training=options)), rounds=4)
    assert list(rates_by_round) == [1, 2, 3, 4]
    for number, rate in enumerate(expected, start=1):
        assert list(rates_by_round[number]) == pytest.approx([rate], rel=1e-12), number


def test_the_round_counts_and_not_how_often_a_client_took_part(tiny, tmp_path, rates_by_round):
    recipe = tiny(**SETTINGS, clients_per_round=1, training=training())
    run(recipe, tmp_path / "run")
    federation = build_federation(recipe)
    assert len({tuple(federation.sampled_clients(number)) for number in (1, 2, 3, 4)}) == 2
    assert [next(iter(rates_by_round[number])) for number in (1, 2, 3, 4)] == pytest.approx(COSINE_OF_FOUR_ROUNDS)


def test_what_the_server_trains_before_the_rounds_has_the_full_rate(tiny, rates):
    recipe = tiny(
        **SETTINGS
        | {"objective": {"name": "simclr", "hidden_features": 16, "output_features": 8}}
        | {"aggregators": ["weighted_mean", {"name": "base_model", "epochs": 1}]},
        training=training(),
    )
    method = build_federation(recipe).method
    rates.append(set())
    method.initial_state()
    assert rates[-1] == {RATE}


@pytest.mark.parametrize("rounds", [1, 2, 7, 100])
def test_the_formula(rounds):
    """Loshchilov & Hutter 2017, SGDR, Eq. 5, with the smallest rate 0 and without restarts."""
    options = TrainingOptions(learning_rate=3.0, learning_rate_schedule="cosine")
    found = [learning_rate(options, number, rounds) for number in range(1, rounds + 1)]
    assert found == pytest.approx([1.5 * (1 + math.cos(math.pi * done / rounds)) for done in range(rounds)])
    assert found[0] == 3.0
    assert all(earlier > later > 0 for earlier, later in itertools.pairwise(found))
