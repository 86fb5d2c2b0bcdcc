"""Hostile input to every path: the reference's value, NaN for NaN, or an error that names the argument."""

import itertools
import math
import warnings

import pytest
import torch

from fedkernels import apply_deltas, delta_gram, info_nce, nt_xent, unbalanced_ot, unbalanced_ot_plan
from tests.fedkernels.conftest import by_reference, is_on_gpu
from tests.fedkernels.inputs import randn
from tests.fedkernels.operators import PATHS, value_and_gradients

FP32, FP64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf


def entry(x):
    return row(x) & (torch.arange(x.shape[-1]) == 0)


def row(x):
    return torch.arange(x.shape[-2])[:, None] == x.shape[-2] // 2


def every(x):
    return torch.tensor(True)


def column(x):
    """All but the last rows: infinite products of one sign with a whole block of rows, and not with these."""
    first = torch.arange(x.shape[-2])[:, None] < max(1, min(x.shape[-2] - 1, 256))
    return first & (torch.arange(x.shape[-1]) == 0)


POISONS = {
    "nothing": lambda x: x,
    "a row of zeros": lambda x: x.masked_fill(row(x), 0),
    "all zeros": torch.zeros_like,
    "duplicates": lambda x: x[..., :1, :].expand(x.shape),
    "1e4": lambda x: 1e4 * x,
    "1e-30": lambda x: 1e-30 * x,
    **{
        f"{where.__name__} of {number}": lambda x, where=where, number=number: x.masked_fill(where(x), number)
        for number, where in itertools.product((NAN, INF, -INF), (entry, row, every))
        if (number, where) != (-INF, row)
    },
    **{
        f"column of {number}": lambda x, number=number: x.abs().masked_fill(column(x), number) for number in (INF, -INF)
    },
}
POISONED = pytest.mark.parametrize("poison", POISONS)


# Of two paths that differ in whether the temperature or scale is a tensor, one.
SIMILARITIES = [
    name
    for name, path in PATHS.items()
    if path.scale is not None
    and "with itself" not in name
    and name not in ("info_nce, temperature", "nt_xent, temperature", "clip_loss", "sigmoid_loss")
]


def problems_of(path):
    """(sizes, options): fewer and more rows than a block has, and for CKA than columns."""
    if "centered" in path.draws:
        return [
            ((*sizes, 3), {"centered": centered})
            for sizes in ((1, 1), (7, 3), (5, 9), (300, 3))
            for centered in (False, True)
        ]
    drawn = {"temperature": 1.0, "reduction": "none"}, {"temperature": 1e-3, "reduction": "sum"}
    options = [{one: value for one, value in given.items() if one in path.draws} for given in drawn]
    return [(sizes, given) for sizes in ((1, 3, 0), (5, 3, 2), (130, 3, 140)) for given in options[: 1 + any(options)]]


# Losses that add rows or take logits apart: of infinite inputs they may make NaN, but nothing finite that is wrong. On
# a GPU all do, for a log-sum-exp and the positive's logit are two numbers there.
MAY_GIVE_NAN = [
    name
    for name in SIMILARITIES
    if name.startswith(("clip_loss", "supervised")) or "labels" in name or "excluded" in name
]


@POISONED
@pytest.mark.parametrize("name", SIMILARITIES)
def test_values_and_gradients_are_those_of_the_reference(name, poison, request):
    """NaN and infinity of the values, and the finite entries of gradients, with each input poisoned and with all."""
    path, on_gpu = PATHS[name], is_on_gpu(request)
    for sizes, options in problems_of(path):
        inputs = path.inputs(*sizes, 1)
        matrices = [number for number, x in enumerate(inputs) if x.ndim > 1]
        if poison == "duplicates":  # a kernel of such rows is zero once it is centred, but for rounding
            matrices = [number for number in matrices if number not in path.symmetric]
        for which in [matrices, *([number] for number in matrices if len(matrices) > 1)]:
            tensors = [POISONS[poison](x) if number in which else x for number, x in enumerate(inputs)]
            tensors = [(x + x.mT) / 2 if number in path.symmetric else x for number, x in enumerate(tensors)]
            leaves = [leaf if number in which else leaf.detach() for number, leaf in enumerate(path.leaves(tensors))]
            value, *gradients = value_and_gradients(path.call, leaves, **options)
            with by_reference():
                truth, *truths = value_and_gradients(path.call, leaves, **options)
            scale, scales = path.scale([x.nan_to_num(0, 0, 0) for x in tensors], **options)
            # Differences of logits keep the rounding of the logits.
            in_value, in_gradients = (1e-9, 1e-7) if "centered" in path.draws else (1e-12 * scale, 1e-13 * scale)
            if (name in MAY_GIVE_NAN or on_gpu) and "inf" in poison:
                truth = torch.where(value.isfinite(), truth, value)
                truths = [
                    torch.where(one.isfinite() & true.isfinite(), true, one)
                    for one, true in zip(gradients, truths, strict=True)
                ]
            torch.testing.assert_close(value, truth, rtol=1e-9, atol=in_value, equal_nan=True)
            for gradient, true in zip(gradients, truths, strict=True):
                # The gradient of an infinite loss may be infinity or NaN.
                assert torch.equal(gradient.isfinite(), true.isfinite())
                largest = float(true.nan_to_num(0, 0, 0).abs().max())
                atol = 1e-9 + in_gradients * (max(scales) + largest)
                gradient, true = (one.nan_to_num(0, 0, 0) for one in (gradient, true))
                torch.testing.assert_close(gradient, true, rtol=1e-9, atol=atol)


@pytest.mark.parametrize("needed", [False, True])
def test_large_logits_in_float32(needed):
    """Logits of 1e12 at temperature 1e-3: the loss is right to float32 and nothing overflows."""
    query, key = (1e4 * randn(count, 16, seed=count, dtype=FP32) for count in (33, 40))
    for function, other in ((info_nce, key), (nt_xent, key[:33])):
        leaves = query.clone().requires_grad_(), other.clone().requires_grad_(needed)
        value, *grads = value_and_gradients(lambda p, q, f=function: f(p, q, 1e-3), leaves)
        truth = function(query.double(), other.double(), 1e-3)
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.cpu_only(reason="a GPU takes the positive's logit from a log-sum-exp: of 1e50 nothing is left in float64")
def test_logits_beyond_float32_are_no_error():
    rows = torch.full((3, 2), 1e25)
    assert info_nce(rows, rows, 1.0).isnan()
    assert nt_xent(rows, rows, 1.0).isnan()
    assert info_nce(rows.double(), rows.double(), 1.0).item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e40, 1e308])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_extreme_temperatures_end(temperature, dtype):
    query, key = randn(4, 3, dtype=dtype).requires_grad_(), randn(9, 3, seed=1, dtype=dtype).requires_grad_()
    loss = info_nce(query, key, temperature) + nt_xent(query, key[:4], temperature)
    torch.autograd.grad(loss, [query, key])
    if temperature > 1:
        assert loss.item() == pytest.approx(math.log(9) + math.log(7))


@POISONED
@pytest.mark.parametrize("shape", [(1, 1), (2, 9, 20)])
@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
def test_unbalanced_ot(poison, shape):
    cost, a = POISONS[poison](randn(*shape, seed=1).abs()), 0.2 + randn(*shape[:-1], seed=2).abs()
    b = POISONS[poison](0.2 + randn(*shape[:-2], shape[-1], 1, seed=3).abs()).squeeze(-1)
    for masses, costs in ((torch.ones_like(b), cost), (b, randn(*shape, seed=1).abs())):
        with warnings.catch_warnings():
            # Two masses of 1e4 that meet costs of order 1 are 1e8 apart from the gap's last digit.
            warnings.simplefilter("ignore", RuntimeWarning)
            value = unbalanced_ot(costs, a, masses, 0.8, 0.9, tol=1e-7)
            plan, info = unbalanced_ot_plan(costs, a, masses, 0.8, 0.9, tol=1e-7)
            truth = by_reference()(unbalanced_ot)(costs, a, masses, 0.8, 0.9, tol=1e-7)
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-12, equal_nan=True)
        assert torch.equal(plan.isnan().all(-1).all(-1), value.isnan())
        assert torch.equal(info.gap.isnan(), value.isnan())
        assert not (plan < 0).any()


@POISONED
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP32])
def test_parameters_that_are_not_finite(poison, dtype):
    """NaN and infinity come through both functions as the references let them, and stay in their entries."""
    start = [randn(5, 7, seed=1).to(dtype), randn(1, seed=2)]
    clients = [[POISONS[poison](randn(5, 7, seed=3)).to(dtype), randn(1, seed=4)], [randn(5, 7, seed=5), start[1]]]
    truth = by_reference()(delta_gram)(start, clients)
    torch.testing.assert_close(delta_gram(start, clients), truth, rtol=1e-12, atol=1e-12, equal_nan=True)
    stepped = [[tensor.clone() for tensor in start] for _ in range(2)]
    apply_deltas(stepped[0], clients, [0.5, 0.25])
    by_reference()(apply_deltas)(stepped[1], clients, [0.5, 0.25])
    torch.testing.assert_close(*stepped, rtol=0, atol=0, equal_nan=True)
