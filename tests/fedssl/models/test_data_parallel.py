"""A client's training by two processes against that by one: BatchNorm's layers, and whole rounds in float64."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedssl.aggregators.base_model import BASE
from fedssl.client import LocalRound
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models import data_parallel
from fedssl.models.data_parallel import Share, StatisticsOfWholeBatch
from fedssl.objectives.base import Step
from fedssl.recipe.recipe import Recipe
from fedssl.regularizers.base import Regularizer, StepLoss
from fedssl.regularizers.representation_alignment import STAGE
from fedssl.training import train_locally
from tests.fedkernels.distributed.ranks import Ranks
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.models.double import to_double

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Stopped with the last test of the file: other tests of the same process count its children."""
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


# BatchNorm

LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "vectors": ({}, (6, 5)),
    "one row a process": ({}, (2, 5)),
    "sequences": ({}, (6, 5, 3)),
    "images": ({}, (6, 5, 4, 3)),
    "without weights": ({"affine": False}, (6, 5, 4, 3)),
    "without running statistics": ({"track_running_stats": False}, (6, 5)),
    "mean over all batches": ({"momentum": None}, (6, 5)),
}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def made(options: dict[str, Any], dims: int, dtype: torch.dtype) -> nn.Module:
    """A layer with weights and running statistics of its own."""
    layer = (nn.BatchNorm2d if dims == 4 else nn.BatchNorm1d)(5, **options).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(5, generator=generator) + 0.5)
    return layer


Outcome = tuple[list[Tensor], list[Tensor], list[Tensor]]


def outcome(layer: nn.Module, x: Tensor, by_output: Tensor) -> Outcome:
    """Of two steps: outputs and the gradients in x; the gradients in the weights; and the layer's buffers."""
    rows: list[Tensor] = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        out = layer(x)
        (out.to(by_output.dtype) * by_output).sum().backward()
        rows += [out.detach(), x.grad]
        x = out
    return rows, [p.grad for p in layer.parameters()], [b.clone() for b in layer.buffers()]


def of_share(x: Tensor, by_output: Tensor, options: dict[str, Any], dtype: torch.dtype) -> Outcome:
    rank = dist.get_rank()
    with StatisticsOfWholeBatch():
        rows, gradients, buffers = outcome(made(options, x.dim(), dtype), x.chunk(2)[rank], by_output.chunk(2)[rank])
    Share(rank, 2).average(gradients)
    return rows, gradients, buffers


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_those_of_the_whole_batch(layer, two_ranks):
    options, shape = LAYERS[layer]
    x, by_output = 3 + drawn(shape, 1), drawn(shape, 2)
    rows, gradients, buffers = outcome(made(options, x.dim(), torch.float64), x, by_output)
    one, other = two_ranks(of_share, x, by_output, options, torch.float64)
    joined = [torch.cat(shares) for shares in zip(one[0], other[0], strict=True)]
    summed = [2 * gradient for gradient in one[1]]
    torch.testing.assert_close([*joined, *summed, *one[2]], [*rows, *gradients, *buffers], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(one[1:], other[1:], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_have_float32_statistics(dtype, two_ranks):
    """As under autocast: the layer's weights are float32, its output has the dtype of its input."""
    x = (100 + drawn((8, 5, 6, 6), 2)).to(dtype).contiguous(memory_format=torch.channels_last)
    by_output = drawn(tuple(x.shape), 3, torch.float32)
    rows, _, (mean, variance, _) = outcome(made({}, 4, torch.float32), x, by_output)
    one, other = two_ranks(of_share, x, by_output, {}, torch.float32)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05  # of a mean of 100 and a deviation of 1
    for number in range(2):
        joined = torch.cat([one[0][number], other[0][number]])
        torch.testing.assert_close(joined, rows[number], atol=tolerance, rtol=tolerance)  # and the dtype is the same
        assert one[0][number].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(one[2][:2], [mean, variance], atol=1e-3, rtol=1e-3)


# Whole rounds

HEADS = {"hidden_features": 16, "output_features": 8}
BYOL = {"name": "byol", **HEADS}
SIMSIAM = {"name": "simsiam", "bottleneck_features": 8, "output_features": 16}
# at its own temperature of 0.05 a difference in the last bit grows to 1e-9 within ten steps
MOCO = {"name": "moco_v3", "temperature": 0.5, **HEADS}
#: changes of a round; the convolutional network has BatchNorm, as have all heads but `supervised`'s
ROUNDS: dict[str, dict[str, Any]] = {
    "byol": {"objective": BYOL},
    "simclr": {"objective": {"name": "simclr", **HEADS}},
    "BatchNorm in the heads alone": {"objective": MOCO, "architectures": ["small_vit"]},
    "no BatchNorm": {"objective": {"name": "supervised"}, "architectures": ["small_vit"]},
    "activations within BatchNorm": {"objective": SIMSIAM, "architectures": ["test_efficientnet"]},
    "joined views": {"objective": MOCO, "training": {"join_views": True}},
    "Adam and a number of steps": {"objective": BYOL, "training": {"optimizer": "adam", "local_steps": 5}},
    "terms of weights": {
        "objective": BYOL,
        "regularizers": [
            {"name": "proximal", "weight": 1.0},
            {"name": "distance_to_global", "of": "weights"},
            {"name": "base_alignment", "weight": 1.0},
        ],
        "aggregators": ["weighted_mean", "base_model"],
    },
    "terms of representations": {
        "objective": BYOL,
        "regularizers": [{"name": "representation_alignment"}, {"name": "distance_to_global"}],
    },
}


def join_group() -> None:
    """Where this process is one of a group, it trains on its share from now on."""
    data_parallel._share = Share(dist.get_rank(), 2) if dist.is_initialized() else Share()


def train(recipe: Recipe, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Client 0's round, from a received model and a previous one that differ from its own."""
    join_group()
    federation = build_federation(recipe)
    client = federation.client(0, Message())
    client.model.train()
    if dtype is torch.float64:
        to_double(client.model)
    others = [build_federation(recipe.model_copy(update={"seed": seed})).new_model(0) for seed in (1, 2)]
    received, previous = ({name: t.to(dtype) for name, t in other.online_state().items()} for other in others)
    base = {f"{BASE}{name}": t.to(dtype) for name, t in others[0].encoder.state_dict().items()}
    client.memory.numbers[STAGE] = 1
    sent, augmentation = Message({**received, **base}), federation.method.augmentation
    local = LocalRound(client, sent, 1, 0, recipe.objective, augmentation, previous)
    train_locally(local, recipe.training, recipe.regularizers, recipe.rounds)
    return client.model.state_dict(), local.logged()


@pytest.fixture
def recipe_of(noisy):
    def build(training: dict[str, Any] | None = None, **changes: Any) -> Recipe:
        training = {"local_epochs": 2, "batch_size": 8} | (training or {})
        return noisy(**AVERAGED | {"partition": {"name": "iid", "clients": 6}, "training": training} | changes)

    return build


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], alone: dict[str, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(one, alone, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_is_that_of_one_process(name, recipe_of, two_ranks):
    recipe = recipe_of(**ROUNDS[name])
    alone, metrics = train(recipe)
    one, other = two_ranks(train, recipe)
    start = build_federation(recipe).new_model(0).double().state_dict()
    assert any((alone[entry] - start[entry]).abs().max() > 1e-3 for entry in alone)
    assert_same(one[0], other[0], alone, 1e-8)
    assert one[1] == other[1]
    assert one[1].keys() == metrics.keys()
    for metric in metrics.keys() - {"memory"}:
        assert one[1][metric] == pytest.approx(metrics[metric], rel=1e-6), metric
    assert one[1]["memory"] < metrics["memory"]


def test_networks_that_compute_in_bfloat16(recipe_of, two_ranks):
    """BatchNorm then gets bfloat16 and float32 weights; the result is as near as bfloat16's 8 bits let it be."""
    recipe = recipe_of(objective=ROUNDS["simclr"]["objective"], training={"precision": "bfloat16", "local_steps": 3})
    alone, metrics = train(recipe, torch.float32)
    one, other = two_ranks(train, recipe, torch.float32)
    assert one[1]["loss"] == pytest.approx(metrics["loss"], rel=0.02)
    assert_same(one[0], other[0], alone, 0.05)


class ExplodesInOne(Regularizer):
    """Not a number in the second process alone, in the first step."""

    def start_round(self, local: LocalRound) -> StepLoss:
        numbers = itertools.count(1)

        def term(step: Step) -> Tensor:
            bad = next(numbers) == 1 and data_parallel.own_share().rank == 1
            return step.loss.new_tensor(float("nan") if bad else 0.0)

        return term


def error_of_training(recipe: Recipe) -> str:
    join_group()
    federation = build_federation(recipe)
    method, client = federation.method, federation.client(0, Message())
    local = LocalRound(client, Message(), 1, 0, method.objective, method.augmentation)
    with pytest.raises(UserError) as error:
        train_locally(local, method.training, [ExplodesInOne(name="explodes")], 1)
    return str(error.value)


def test_all_processes_tell_the_same_first_step_that_diverged(recipe_of, two_ranks):
    """The losses are looked at once an epoch: by then nan is in the first process's weights, too, and in its losses."""
    told = two_ranks(error_of_training, recipe_of(objective=SIMSIAM))
    assert "client 0's loss became nan in round 1, step 1;" in told[0]
    assert told[0] == told[1]
