"""The counter of what a training step takes, against figures by hand."""

import pytest
import torch
from torch import nn

from fedssl import training
from fedssl.accounting import StepCounter
from fedssl.federation import build_federation
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.test_shipped_recipes import small


@pytest.fixture
def two() -> nn.Sequential:
    """A frozen linear map 8 -> 16 and an active one 16 -> 4."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


#: of five rows: once forward through the first map, and forward and backward through the second
FLOPS = 1 * 2 * (5 * 8 * 16) + 3 * 2 * (5 * 16 * 4)


def test_a_step_by_hand(two):
    optimizer = torch.optim.Adam(two[1].parameters())
    counter = StepCounter(two)
    with counter.forward():
        with torch.no_grad():
            hidden = two[0](torch.randn(5, 8))
        loss = two[1](hidden).sum()
    loss.backward()
    optimizer.step()
    cost = counter.finish(optimizer)
    assert cost.flops == FLOPS
    assert cost.activations == 4 * 5 * 16  # the active map keeps its input; its weight is counted as a parameter
    assert cost.parameters == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert cost.gradients == 4 * (16 * 4 + 4)
    assert cost.optimizer == 2 * cost.gradients + 2 * 4  # two moments, and a step count for each tensor
    assert cost.memory == cost.activations + cost.parameters + cost.gradients + cost.optimizer


def test_what_lies_before_the_first_layer_that_trains_has_no_backward_pass(two):
    """A frozen stem runs while gradients are enabled, and yet only forward."""
    counter = StepCounter(two)
    with counter.forward():
        two(torch.randn(5, 8))
    assert counter.flops == FLOPS
    last_frozen = StepCounter(turned := nn.Sequential(nn.Linear(6, 8), two[0]))
    with last_frozen.forward():
        turned(torch.randn(5, 6))
    assert last_frozen.flops == 3 * 2 * (5 * 6 * 8) + 2 * 2 * (5 * 8 * 16)  # no gradient of the frozen weights


def test_activations_are_counted_at_their_peak_and_each_storage_once():
    model = nn.Linear(4, 4)
    counter = StepCounter(model)
    with counter.forward():
        x = torch.randn(10, 4, requires_grad=True)
        first = (x.exp() + x.exp().square()).sum()  # two results of exp; square keeps the second again
        first.backward()
        del first
        x.detach().requires_grad_().exp().sum().backward()
    assert counter._peak == 2 * 4 * 10 * 4
    assert counter._bytes == 0


def test_clients_with_equal_steps_are_counted_once(tiny, monkeypatch):
    """Five clients of two architectures; another batch size and another round of a method without terms."""
    recipe = tiny(
        architectures=["small_convnet", "small_convnet_wide"],
        partition={"name": "iid", "clients": 5},
        training={"local_steps": 1, "batch_size": 8},
    )
    counters: list[StepCounter] = []
    monkeypatch.setattr(training, "StepCounter", lambda *given: counters.append(StepCounter(*given)) or counters[-1])
    training.STEP_COSTS.clear()
    train_rounds(build_federation(recipe), 2)
    assert len(counters) == 2
    smaller = recipe.training.model_copy(update={"batch_size": 4})
    train_rounds(build_federation(recipe.model_copy(update={"training": smaller})), 1)
    assert len(counters) == 4


@pytest.mark.parametrize("name", ["fedca", "lw_fedssl", "hetero_ssfl"])
def test_what_a_round_takes_does_not_depend_on_what_was_counted_before(name, monkeypatch):
    """Terms that begin later, stages, unequal clients: every client's figures are those of its own count."""
    logged, partition = [], "partition={name: dirichlet, clients: 3, alpha: 0.5, min_samples: 10}"
    for remembered in (True, False):
        training.STEP_COSTS.clear()
        if not remembered:
            monkeypatch.setattr(training, "_kind_of_step", lambda *parts: object())
        rounds = train_rounds(build_federation(small(name, partition)), 2)
        replies = [reply.metrics for number in (1, 2) for reply in rounds.replies[number].values()]
        logged.append([(metrics["memory"], metrics["flops"]) for metrics in replies])
    assert logged[0] == logged[1]
    assert len(logged[0]) == 6
