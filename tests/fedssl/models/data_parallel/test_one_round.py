"""A client's round by two processes against that by one, in float64: weights, statistics and metrics."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedssl.aggregators.base_model import BASE
from fedssl.client import LocalRound
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models import data_parallel
from fedssl.models.data_parallel import Share
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.parts import part_class, part_names
from fedssl.recipe.reading import parse_recipe
from fedssl.regularizers.base import Regularizer, StepLoss
from fedssl.regularizers.representation_alignment import STAGE
from fedssl.training import train_locally
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL, TINY, tiny_values

OBJECTIVES: dict[str, Any] = {
    "byol": {"name": "byol", "hidden_features": 16, "output_features": 8},
    "one direction": {"name": "byol", "hidden_features": 16, "output_features": 8, "symmetric": False},
    "simsiam": {"name": "simsiam", "bottleneck_features": 8, "output_features": 16},
    "simclr": {"name": "simclr", "hidden_features": 16, "output_features": 8},
    # at its own temperature of 0.05 a difference in the last bit grows to 1e-9 within ten steps
    "moco_v3": {"name": "moco_v3", "hidden_features": 16, "output_features": 8, "temperature": 0.5},
    "supervised": {"name": "supervised"},
}
TERMS: dict[str, Any] = {
    "proximal": {"name": "proximal", "weight": 1.0},
    "representation_alignment": {"name": "representation_alignment"},
    "distance of representations": {"name": "distance_to_global"},
    "distance of weights": {"name": "distance_to_global", "of": "weights"},
    "base_alignment": {"name": "base_alignment", "weight": 1.0},
}
EPOCHS, BATCH_SIZE = 2, 8


class Double:
    """An objective in float64, so that the order of a sum does not matter."""

    def __init__(self, objective: Any):
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        return self._objective.step(model, tuple(view.double() for view in views), labels)


class DoubleViews(Regularizer):
    """A term whose own models get float64 views, too."""

    term: Any

    def start_round(self, local: LocalRound) -> StepLoss:
        term = self.term.start_round(local)

        def of_double(step: Step) -> Tensor:
            step.views = tuple(view.double() for view in step.views)
            return term(step)

        return of_double


def train(values: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Client 0's round, from a received model and a previous one that differ from its own.

    Where this process is one of a group, it trains on its data_parallel.
    """
    data_parallel._share = Share(dist.get_rank(), 2) if dist.is_initialized() else Share()
    federation = build_federation(parse_recipe(values))
    recipe, method = federation.recipe, federation.method
    client = federation.client(0, Message())
    client.model.to(dtype).train()
    others = [build_federation(parse_recipe(values | {"seed": seed})).client(0, Message()).model for seed in (1, 2)]
    received, previous = ({name: t.to(dtype) for name, t in other.online_state().items()} for other in others)
    base = {f"{BASE}{name}": t.to(dtype) for name, t in others[0].encoder.state_dict().items()}
    client.memory.numbers[STAGE] = 1
    objective: Any = Double(method.objective) if dtype is torch.float64 else method.objective
    local = LocalRound(client, Message({**received, **base}), 1, 0, objective, method.augmentation, previous)
    terms = [DoubleViews(term=regularizer) for regularizer in recipe.regularizers]
    train_locally(local, recipe.training, terms, recipe.rounds)
    return client.model.state_dict(), local.logged()


def train_stages(values: dict[str, Any]) -> dict[str, Tensor]:
    """Client 0's model after two whole rounds, in each of which it receives its own weights."""
    data_parallel._share = Share(dist.get_rank(), 2) if dist.is_initialized() else Share()
    federation = build_federation(parse_recipe(values))
    method: Any = dataclasses.replace(federation.method, objective=Double(federation.method.objective))
    client = federation.client(0, Message())
    client.model.double()
    for number in (1, 2):
        method.counted_round(client, Message(client.model.online_state()), number)
    return client.model.state_dict()


def values_of(objective: str, training: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    training = {"local_epochs": EPOCHS, "batch_size": BATCH_SIZE} | (training or {})
    values = {"objective": OBJECTIVES[objective], "data": TINY["data"] | {"train_limit": 60}, "training": training}
    return tiny_values(**values | AVERAGED | changes)


def compare(values: dict[str, Any], two_ranks: Any) -> None:
    alone, metrics = train(values)
    one, other = two_ranks(train, values)
    start = build_federation(parse_recipe(values)).client(0, Message()).model.double().state_dict()
    assert any((alone[name] - start[name]).abs().max() > 1e-3 for name in alone)
    for name, tensor in alone.items():
        torch.testing.assert_close(one[0][name], tensor, atol=1e-8, rtol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
        assert torch.equal(one[0][name], other[0][name]), name
    assert one[1] == other[1]
    assert one[1].keys() == metrics.keys()
    for name in metrics.keys() - {"memory"}:
        assert one[1][name] == pytest.approx(metrics[name], rel=1e-6), name
    assert one[1]["memory"] < metrics["memory"]


@pytest.mark.parametrize("architecture", ["small_convnet", "small_vit"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective(objective, architecture, two_ranks):
    """The convolutional network has BatchNorm, the transformer none; heads have it but `supervised`'s."""
    compare(values_of(objective, architectures=[architecture]), two_ranks)


@pytest.mark.parametrize("term", TERMS)
def test_each_regularizer(term, two_ranks):
    aggregators = ["weighted_mean", "base_model"] if term == "base_alignment" else ["weighted_mean"]
    compare(values_of("byol", regularizers=[TERMS[term]], aggregators=aggregators), two_ranks)


@pytest.mark.parametrize("training", [{"join_views": True}, {"optimizer": "adam"}, {"local_steps": 7}])
def test_options_of_training(training, two_ranks):
    compare(values_of("moco_v3", training), two_ranks)


def test_a_timm_network_with_activations_in_its_batch_norms(two_ranks):
    compare(
        values_of("simsiam", {"local_steps": 3, "local_epochs": 1}, architectures=["mobilenetv3_small_050"]), two_ranks
    )


def test_a_stage_with_frozen_layers(two_ranks):
    values = values_of("moco_v3", {"local_epochs": 1, "learning_rate": 0.01}, schedule=LW_FEDSSL["schedule"])
    alone = train_stages(values)
    one, other = two_ranks(train_stages, values)
    for name, tensor in alone.items():
        torch.testing.assert_close(one[name], tensor, atol=1e-8, rtol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
        assert torch.equal(one[name], other[name]), name


def test_networks_that_compute_in_bfloat16(two_ranks):
    """BatchNorm then gets bfloat16 and float32 weights; the result is as near as bfloat16's 8 bits let it be."""
    values = values_of("simclr", {"precision": "bfloat16", "local_steps": 3})
    alone, metrics = train(values, torch.float32)
    one, other = two_ranks(train, values, torch.float32)
    assert one[1]["loss"] == pytest.approx(metrics["loss"], rel=0.02)
    for name, tensor in alone.items():
        torch.testing.assert_close(one[0][name], tensor, atol=0.05, rtol=0.05)
        assert torch.equal(one[0][name], other[0][name]), name


def test_every_part_that_says_that_it_can_be_shared_is_tested_here():
    for folder, tested in (("objectives", OBJECTIVES), ("regularizers", TERMS)):
        said = {name for name in part_names(folder) if part_class(folder, name).is_data_parallel()}
        assert said == {case["name"] for case in tested.values()}


class ExplodesInOne(Regularizer):
    """Not a number in the second process alone, in the first step."""

    def start_round(self, local: LocalRound) -> StepLoss:
        numbers = itertools.count(1)

        def term(step: Step) -> Tensor:
            bad = next(numbers) == 1 and data_parallel.own_share().rank == 1
            return step.loss.new_tensor(float("nan") if bad else 0.0)

        return term


def error_of_training(values: dict[str, Any]) -> str:
    data_parallel._share = Share(dist.get_rank(), 2)
    federation = build_federation(parse_recipe(values))
    method, client = federation.method, federation.client(0, Message())
    local = LocalRound(client, Message(), 1, 0, method.objective, method.augmentation)
    with pytest.raises(UserError) as error:
        train_locally(local, method.training, [ExplodesInOne(name="explodes")], 1)
    return str(error.value)


def test_all_processes_tell_the_same_first_step_that_diverged(two_ranks):
    """The losses are looked at once an epoch: by then nan is in the first process's weights, too, and in its losses."""
    told = two_ranks(error_of_training, values_of("simsiam", {"local_epochs": 1}))
    assert "client 0's loss became nan in round 1, step 1;" in told[0]
    assert told[0] == told[1]
