"""The distance between the clients' models, by hand and against whole networks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedssl.aggregators.eua import EUA
from fedssl.aggregators.l_dawa import LDawa
from fedssl.aggregators.weighted_mean import DISTANCE, WeightedMean
from fedssl.engines.flower.privacy import private_federation
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.recipe import FlowerOptions
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL
from tests.fedssl.rounds_in_memory import train_rounds

WEIGHT, MEAN = "online.encoder.weight", "online.encoder.bn.running_mean"


def at(x: float, y: float, mean: float = 0.0) -> Message:
    return Message({WEIGHT: torch.tensor([float(x), float(y)]), MEAN: torch.tensor([float(mean)])}, {"samples": 1.0})


def test_the_mean_by_hand():
    """Of one sample and of three; a counter is rounded to the nearest integer."""
    counter = "online.encoder.bn.num_batches_tracked"
    replies = {
        2: Message({WEIGHT: torch.tensor([8.0, 0.0]), counter: torch.tensor(3)}, {"samples": 1.0}),
        5: Message({WEIGHT: torch.tensor([0.0, 4.0]), counter: torch.tensor(4)}, {"samples": 3.0}),
    }
    state = WeightedMean().aggregate(Message(replies[2].tensors), replies)
    assert state.tensors[WEIGHT].tolist() == [2.0, 3.0]
    assert state.tensors[counter].item() == 4  # 3.75
    assert state.tensors[counter].dtype == torch.int64


@pytest.mark.parametrize("part", [WeightedMean(), EUA(), LDawa()])
def test_the_distance_between_local_models_by_hand(part):
    """(0, 0), (3, 0) and (0, 4) are 3, 4 and 5 apart; running means count in no distance."""
    replies = {0: at(0, 0, mean=100), 4: at(3, 0), 7: at(0, 4, mean=-7)}
    server = Message(at(1, 1).tensors, {"l_dawa.rounds": 5.0})
    assert part.aggregate(server, replies).metrics[DISTANCE] == pytest.approx(4.0)
    # the paper's: a client drawn at random, its distances to the others averaged
    of_each = [(3 + 4) / 2, (3 + 5) / 2, (4 + 5) / 2]
    assert sum(of_each) / 3 == 4.0


def test_there_is_no_distance_of_one_client_or_of_a_mean_that_stands_for_all():
    part, server = WeightedMean(), Message(at(1, 1).tensors)
    assert DISTANCE not in part.aggregate(server, {2: at(0, 0)}).metrics
    generator = torch.Generator().manual_seed(0)
    mean = {WEIGHT: torch.randn(5000, generator=generator)}
    server = Message({WEIGHT: torch.randn(5000, generator=generator)})
    replies = {k: Message(mean, {"samples": 1.0}) for k in range(5)}  # what secure aggregation gives
    assert DISTANCE not in part.aggregate(server, replies).metrics


@pytest.mark.parametrize("schedule", ["layer_wise", "progressive"])
def test_the_distance_over_what_travels_is_that_of_the_whole_networks_of_the_stage(schedule, tiny):
    """In stage 2 of `layer_wise` the first two layers are final and do not travel; each client has the same of them."""
    recipe = tiny(**LW_FEDSSL | {"schedule": {"name": schedule, "layers_per_stage": 2, "rounds_per_stage": 1}})
    federation = build_federation(recipe)
    for number in (1, 2):
        done = train_rounds(federation, number)
        networks = []
        for k in range(3):
            model = federation.client(k, done.clients[k]).model
            plan = federation.method.plan(model, number)
            inside = {f"encoder.{name}" for name in model.encoder.names(range(plan.depth), top=plan.depth)}
            weights = [
                parameter.detach().flatten().double()
                for name, parameter in model.online.named_parameters()
                if name in inside or not name.startswith("encoder.")
            ]
            networks.append(torch.cat(weights))
        distances = [float((networks[a] - networks[b]).norm()) for a, b in ((0, 1), (0, 2), (1, 2))]
        assert min(distances) > 0
        assert done.server.metrics[DISTANCE] == pytest.approx(sum(distances) / 3, rel=1e-6)
        sent = sum(t.numel() for name, t in done.replies[number][0].tensors.items() if "running" not in name)
        assert sent < len(networks[0]) or (number, schedule) != (2, "layer_wise")


def test_no_distance_is_logged_of_noisy_weights(tiny):
    federation = build_federation(tiny(**AVERAGED))
    done = train_rounds(federation, 1)
    assert done.server.metrics[DISTANCE] > 0
    privacy = {"name": "local_dp", "clipping_norm": 1.0, "epsilon": 1.0, "delta": 1e-5}
    recipe = federation.recipe.model_copy(update={"flower": FlowerOptions(differential_privacy=privacy)})
    private = private_federation(dataclasses.replace(federation, recipe=recipe))
    state = private.method.aggregate(federation.method.initial_state(), done.replies[1], 1)
    assert DISTANCE not in state.metrics
