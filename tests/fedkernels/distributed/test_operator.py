"""The distributed losses as an operator: opcheck, torch.compile and bad input, in a group of one rank."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedkernels import distributed
from tests.fedkernels.operators import PATHS, value_and_gradients
from tests.fedkernels.refusals import refusals
from tests.fedkernels.test_contexts import assert_exports

pytestmark = pytest.mark.usefixtures("one_rank")
METHOD = pytest.mark.parametrize("method", ["gather", "ring"])


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


# Of the table, with a gradient in the temperature, or in the scale and the bias.
PATHS_OF_LOSSES = [
    *("info_nce, temperature", "nt_xent, temperature", "clip_loss, logit_scale", "sigmoid_loss, scale and bias"),
    "supervised_contrastive_loss, odd, temperature",
]
EVERY = pytest.mark.parametrize("name", PATHS_OF_LOSSES)


def on_ranks(name: str, method: str = "gather") -> Callable[..., Tensor]:
    return lambda *tensors: PATHS[name].call(*tensors, source=distributed, method=method)


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "sigmoid_loss", "supervised_contrastive_loss"])
def test_opcheck(loss):
    query, key = inputs((4, 3), (4, 3))
    numbers = [0.5, -1.0] if loss == "sigmoid_loss" else 0.5
    scale = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    name = str(dist.group.WORLD.group_name)
    torch.library.opcheck(
        torch.ops.fedkernels.distributed_losses.default,
        (query, key, scale, torch.arange(4) // 2, loss, "ring", name, True, True),
    )


@METHOD
def test_opcheck_of_the_gradients(method):
    query, key = (part.detach() for part in inputs((4, 3), (4, 3)))
    scale, name = torch.tensor(2.0, dtype=torch.float64), str(dist.group.WORLD.group_name)
    labels = torch.empty(0, dtype=torch.int64)
    _, logsumexp, _, *of_keys = torch.ops.fedkernels.distributed_losses(
        query, key, scale, labels, "info_nce", method, name, True, True
    )
    torch.library.opcheck(
        torch.ops.fedkernels.distributed_gradients.default,
        (query, key, scale, labels, logsumexp, torch.ones(4).double(), *of_keys, "info_nce", method, name),
    )


@EVERY
def test_compile(name):
    leaves = PATHS[name].leaves(PATHS[name].inputs(4, 3, 0, 1))
    compiled = torch.compile(on_ranks(name, "ring"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(value_and_gradients(compiled, leaves), value_and_gradients(on_ranks(name), leaves))


@EVERY
def test_an_exported_program_serves_batches_of_other_sizes(name):
    assert_exports(on_ranks(name), lambda n: PATHS[name].inputs(n, 3, 0, n))


@METHOD
@EVERY
def test_blocks_of_logits_join(name, method, monkeypatch):
    """As on CUDA: without the compiled operator, and with fewer logits at a time than there are."""
    monkeypatch.setattr("fedkernels.distributed._block._LOGITS_AT_A_TIME", 20)
    monkeypatch.setattr("fedkernels.internal.native.module", None)
    leaves = PATHS[name].leaves(PATHS[name].inputs(7, 3, 2, 1))
    found, expected = (value_and_gradients(call, leaves) for call in (on_ranks(name, method), PATHS[name].call))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@EVERY
def test_autocast_narrows_nothing(name, dtype):
    leaves = PATHS[name].leaves(PATHS[name].inputs(4, 3, 0, 1), dtype)
    with torch.autocast("cpu", torch.bfloat16):
        inside = on_ranks(name)(*leaves)
    torch.testing.assert_close(inside, on_ranks(name)(*leaves), rtol=0, atol=0)


def test_second_derivatives_and_forward_mode_are_errors():
    query, key = inputs((4, 3), (4, 3))
    with pytest.raises(RuntimeError, match="no forward mode"):
        torch.func.jvp(lambda key: distributed.info_nce(query, key, 0.5), (key.detach(),), (query.detach(),))
    (gradient,) = torch.autograd.grad(distributed.info_nce(query, key, 0.5), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def loss_of(**options):
    return distributed.info_nce(**{"query": torch.ones(4, 3), "key": torch.ones(4, 3), "temperature": 0.5} | options)


test_bad_input = refusals(
    (lambda: loss_of(method="star"), ValueError, "method must be one of gather, ring, got 'star'"),
    (lambda: loss_of(temperature=0), ValueError, "temperature must be positive"),
    (lambda: loss_of(reduction="max"), ValueError, "reduction must be one of"),
    (lambda: loss_of(key=torch.ones(4, 2)), ValueError, "key must have the d = 3 columns"),
    (lambda: loss_of(query=[1.0]), TypeError, "query must be a torch.Tensor"),
    (lambda: loss_of(negatives=torch.ones(4, 2)), ValueError, "negatives must have the d = 3 columns"),
    (
        lambda: loss_of(key=torch.ones(3, 3), negatives=torch.ones(4, 3)),
        ValueError,
        "key must have at least the B = 4 rows",
    ),
    (lambda: loss_of(group="all"), ValueError, "group must be a process group"),
)
