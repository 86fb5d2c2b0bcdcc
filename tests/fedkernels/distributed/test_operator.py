"""The distributed losses as an operator: opcheck, torch.compile and bad input, in a group of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fedkernels
from fedkernels import distributed
from fedkernels.internal.contrastive import rows_of
from tests.fedkernels.refusals import refusals
from tests.fedkernels.test_contexts import assert_exports

pytestmark = pytest.mark.usefixtures("one_rank")
METHOD = pytest.mark.parametrize("method", ["gather", "ring"])


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


LOSSES = {name: getattr(distributed, name) for name in distributed.__all__ if name != "sigreg"}  # of pairs
# Of one pair of inputs, as the others: the first rows with labels, each of which two rows have or none.
LOSSES["supervised_contrastive_loss"] = lambda first, second, *given, **options: (
    distributed.supervised_contrastive_loss(
        rows_of(first, second), torch.arange(2 * first.shape[0]) % (first.shape[0] + 1), *given, **options
    )
)


def numbers(loss: str) -> list[float]:
    """The loss's temperature or scale, and its bias if it has one."""
    return [0.5, -1.0] if loss == "sigmoid_loss" else [0.5]


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "sigmoid_loss", "supervised_contrastive_loss"])
def test_opcheck(loss):
    query, key = inputs((4, 3), (4, 3))
    scale = torch.tensor(numbers(loss), dtype=torch.float64).squeeze().requires_grad_()
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


@pytest.mark.parametrize("loss", LOSSES)
def test_compile(loss):
    given = *inputs((4, 3), (4, 3)), *(torch.tensor(one).double().requires_grad_() for one in numbers(loss))
    function = LOSSES[loss]
    compiled = torch.compile(lambda *given: function(*given, method="ring"), fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*given), given)
    torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_exported_program_serves_batches_of_other_sizes(loss):
    assert_exports(lambda *rows: LOSSES[loss](*rows, *numbers(loss)), lambda n: inputs((n, 3), (n, 3)))


@METHOD
def test_blocks_of_logits_join(method, monkeypatch):
    """As on CUDA: without the compiled operator, and with fewer logits at a time than there are."""
    monkeypatch.setattr("fedkernels.distributed._block._LOGITS_AT_A_TIME", 20)
    monkeypatch.setattr("fedkernels.internal.native.module", None)
    query, key = inputs((7, 3), (9, 3))
    of_labels = torch.cat([query, key]), torch.arange(16) % 6, 0.5
    for name, given, options in (
        ("info_nce", (query, key, 0.5), {}),
        ("info_nce", (query, key[:7], 0.5), {"negatives": key[7:]}),
        ("nt_xent", (query, key[:7], 0.5), {}),
        ("supervised_contrastive_loss", of_labels, {}),
        ("sigmoid_loss", (query, key[:7], 2.0, -1.0), {}),
    ):
        ours = getattr(distributed, name)(*given, **options, method=method)
        expected = getattr(fedkernels, name)(*given, **options)
        torch.testing.assert_close(ours, expected)
        gradients = (torch.autograd.grad(value, (query, key)) for value in (ours, expected))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_narrows_nothing(loss, dtype):
    given = *(part.to(dtype) for part in inputs((4, 3), (4, 3))), *numbers(loss)
    with torch.autocast("cpu", torch.bfloat16):
        inside = LOSSES[loss](*given)
    torch.testing.assert_close(inside, LOSSES[loss](*given), rtol=0, atol=0)


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
    (lambda: loss_of(temperature="1"), TypeError, "temperature must be"),
    (lambda: loss_of(temperature=torch.ones(2)), ValueError, "temperature must"),
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
