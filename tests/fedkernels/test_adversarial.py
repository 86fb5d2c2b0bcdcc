"""Hostile input to every operator: the reference's value, NaN for NaN, or an error that names the argument."""

import math
import warnings

import pytest
import torch

from fedkernels import (
    apply_deltas,
    client_weights,
    delta_gram,
    info_nce,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    nt_xent,
    unbalanced_ot,
    unbalanced_ot_plan,
)
from fedkernels.internal import native

FP32, FP64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf


def randn(*shape, seed=0, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def by_reference(function, monkeypatch):
    """`function` as it is without the compiled module."""

    def run(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(native, "module", None)
            return function(*arguments, **options)

    return run


def value_and_gradients(function, tensors, needed):
    leaves = [tensor.detach().clone().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
    value = function(*leaves)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return [value.detach(), *(torch.autograd.grad(value.sum(), asked) if asked else ())]


def assert_agree(function, tensors, needed, monkeypatch, atol=1e-9):
    """NaN and infinity of the values are those of the reference, as are the finite entries of all gradients."""
    value, *grads = value_and_gradients(function, tensors, needed)
    truth, *true_grads = by_reference(value_and_gradients, monkeypatch)(function, tensors, needed)
    torch.testing.assert_close(value, truth, rtol=1e-9, atol=atol, equal_nan=True)
    for grad, true_grad in zip(grads, true_grads, strict=True):
        # The gradient of an infinite loss may be infinity or NaN.
        assert torch.equal(grad.isfinite(), true_grad.isfinite())
        finite = true_grad.isfinite()
        size = float(true_grad[finite].abs().max()) if finite.any() else 0
        torch.testing.assert_close(grad[finite], true_grad[finite], rtol=1e-9, atol=atol * (1 + size))


def nothing(rows):
    pass


def one(value):
    def poison(rows):
        rows[..., rows.shape[-2] // 2, 0] = value

    return poison


def row(value):
    def poison(rows):
        rows[..., rows.shape[-2] // 2, :] = value

    return poison


def every(value):
    def poison(rows):
        rows[...] = value

    return poison


def first_columns(value):
    """Infinite products of one sign with a whole block of rows, and not with the last rows."""

    def poison(rows):
        rows.abs_()
        rows[..., : max(1, min(rows.shape[-2] - 1, 256)), 0] = value

    return poison


def duplicates(rows):
    rows[...] = rows[..., :1, :].clone()


POISONS = {
    "nothing": nothing,
    "a NaN": one(NAN),
    "a row of NaN": row(NAN),
    "all NaN": every(NAN),
    "an inf": one(INF),
    "a -inf": one(-INF),
    "a row of inf": row(INF),
    "all inf": every(INF),
    "all -inf": every(-INF),
    "a column of inf": first_columns(INF),
    "a column of -inf": first_columns(-INF),
    "a row of zeros": row(0.0),
    "all zeros": every(0.0),
    "duplicates": duplicates,
    "1e4": lambda rows: rows.mul_(1e4),
    "1e-30": lambda rows: rows.mul_(1e-30),
}
POISONED = pytest.mark.parametrize("poison", POISONS)


def poisoned(rows, poison):
    rows = rows.clone()
    POISONS[poison](rows)
    return rows


# ---- the contrastive losses ---------------------------------------------------------------------------------

BATCHES = pytest.mark.parametrize(("batch", "keys"), [(1, 1), (1, 3), (5, 5), (5, 300), (130, 270)])


@POISONED
@BATCHES
@pytest.mark.parametrize("which", ["query", "key", "both"])
def test_info_nce(poison, batch, keys, which, monkeypatch):
    query, key = randn(batch, 3, seed=1), randn(keys, 3, seed=2)
    query = query if which == "key" else poisoned(query, poison)
    key = key if which == "query" else poisoned(key, poison)
    for temperature in (1.0, 1e-3):
        for reduction in ("none", "sum"):
            for needed in ((False, False), (True, False), (True, True)):
                function = lambda q, k, t=temperature, r=reduction: info_nce(q, k, t, r)  # noqa: E731
                # Differences of logits keep the rounding of the logits.
                size = query.nan_to_num(0, 0, 0).abs().max() * key.nan_to_num(0, 0, 0).abs().max() / temperature
                assert_agree(function, (query, key), needed, monkeypatch, 1e-12 * (1 + float(size)) / temperature)


@POISONED
@pytest.mark.parametrize("batch", [1, 5, 140])
@pytest.mark.parametrize("which", ["view1", "both"])
def test_nt_xent(poison, batch, which, monkeypatch):
    view1, view2 = poisoned(randn(batch, 3, seed=1), poison), randn(batch, 3, seed=2)
    view2 = poisoned(view2, poison) if which == "both" else view2
    for temperature in (1.0, 1e-3):
        for reduction in ("none", "sum"):
            function = lambda p, q, t=temperature, r=reduction: nt_xent(p, q, t, r)  # noqa: E731
            both = torch.cat([view1, view2]).nan_to_num(0, 0, 0)
            size = float(both.abs().max()) ** 2 / temperature
            assert_agree(function, (view1, view2), (True, True), monkeypatch, 1e-12 * (1 + size) / temperature)


@pytest.mark.parametrize("needed", [(True, False), (True, True)])
def test_large_logits_in_float32(needed):
    """Logits of 1e12 at temperature 1e-3: the loss is right to float32 and nothing overflows."""
    query, key = (1e4 * randn(count, 16, seed=count, dtype=FP32) for count in (33, 40))
    for function, other in ((info_nce, key), (nt_xent, key[:33])):
        tensors = (query, other)
        value, *grads = value_and_gradients(lambda p, q, f=function: f(p, q, 1e-3), tensors, needed)
        truth = function(query.double(), other.double(), 1e-3)
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)
        assert all(grad.isfinite().all() for grad in grads)


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


# ---- CKA ----------------------------------------------------------------------------------------------------


@POISONED
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (7, 3), (5, 9), (300, 3), (2, 6, 4)])
def test_linear_cka(poison, centered, shape, monkeypatch):
    x, y = poisoned(randn(*shape, seed=1), poison), randn(*shape[:-1], 4, seed=2)
    kernel = y @ y.mT
    cases = [
        (lambda x, y: linear_cka(x, y, centered), (x, y)),
        (lambda x, y: linear_cka(y, x, centered), (x, y)),
        (lambda x: linear_cka(x, x, centered), (x,)),
        (lambda x, k: linear_cka_to_kernel(x, k, centered), (x, kernel)),
        (lambda y, k: linear_cka_to_kernel(y, k, centered), (y, poisoned(kernel, poison))),
    ]
    if len(shape) == 2:
        cases.append((lambda x, y: linear_cka_pairwise([x, y], [y, x], centered), (x, y)))
    for function, tensors in cases:
        size = 1e-6 * float(1 / tensors[0].nan_to_num(1, 1, 1).norm().clamp(min=1e-40))  # of the gradient
        assert_agree(function, tensors, (True,) * len(tensors), monkeypatch, 1e-9 + size)


# ---- transport ----------------------------------------------------------------------------------------------


@POISONED
@pytest.mark.parametrize("shape", [(1, 1), (5, 4), (2, 9, 20)])
@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
def test_unbalanced_ot(poison, shape, monkeypatch):
    cost, a = poisoned(randn(*shape, seed=1).abs(), poison), 0.2 + randn(*shape[:-1], seed=2).abs()
    b = poisoned(0.2 + randn(*shape[:-2], shape[-1], 1, seed=3).abs(), poison).squeeze(-1)
    for masses, costs in ((torch.ones_like(b), cost), (b, randn(*shape, seed=1).abs())):
        with warnings.catch_warnings():
            # Two masses of 1e4 that meet costs of order 1 are 1e8 apart from the gap's last digit.
            warnings.simplefilter("ignore", RuntimeWarning)
            value = unbalanced_ot(costs, a, masses, 0.8, 0.9, tol=1e-7)
            plan, info = unbalanced_ot_plan(costs, a, masses, 0.8, 0.9, tol=1e-7)
            truth = by_reference(unbalanced_ot, monkeypatch)(costs, a, masses, 0.8, 0.9, tol=1e-7)
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-12, equal_nan=True)
        assert torch.equal(plan.isnan().all(-1).all(-1), value.isnan())
        assert torch.equal(info.gap.isnan(), value.isnan())
        assert not (plan < 0).any()


def test_negative_costs_and_masses(monkeypatch):
    cost, a, b = randn(3, 9, 8, seed=1), randn(3, 9, seed=2), randn(3, 8, seed=3)
    value = unbalanced_ot(cost, a, b, 0.8, 0.9, tol=1e-8)
    torch.testing.assert_close(value, by_reference(unbalanced_ot, monkeypatch)(cost, a, b, 0.8, 0.9, tol=1e-8))


# ---- the server's step --------------------------------------------------------------------------------------


@pytest.mark.cpu_only(reason="the weights are NaN")
@POISONED
def test_client_weights(poison, monkeypatch):
    deltas = poisoned(randn(6, 40, seed=1), poison)
    gram = deltas @ deltas.T
    if gram.isfinite().all():
        weights = client_weights(gram)
        torch.testing.assert_close(weights, by_reference(client_weights, monkeypatch)(gram))
        assert float(weights.sum()) == pytest.approx(1)
        return
    with pytest.raises(ValueError, match="gram must be finite"):
        client_weights(gram)
    batch = torch.stack([torch.eye(6, dtype=FP64), gram])
    with pytest.raises(ValueError, match="gram must be finite"):
        client_weights(batch)


def test_client_weights_of_extreme_scale():
    gram = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=FP64))
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        torch.testing.assert_close(client_weights(scale * gram), client_weights(gram))
    torch.testing.assert_close(client_weights(gram.float() * 1e-38), client_weights(gram.float()))


@POISONED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32, FP64])
def test_parameters_that_are_not_finite(poison, dtype, monkeypatch):
    """NaN and infinity come through both functions as the references let them, and stay in their entries."""
    start = [randn(5, 7, seed=1).to(dtype), randn(1, seed=2)]
    clients = [[poisoned(randn(5, 7, seed=3), poison).to(dtype), randn(1, seed=4)], [randn(5, 7, seed=5), start[1]]]
    truth = by_reference(delta_gram, monkeypatch)(start, clients)
    torch.testing.assert_close(delta_gram(start, clients), truth, rtol=1e-12, atol=1e-12, equal_nan=True)
    stepped = [[tensor.clone() for tensor in start] for _ in range(2)]
    apply_deltas(stepped[0], clients, [0.5, 0.25])
    by_reference(apply_deltas, monkeypatch)(stepped[1], clients, [0.5, 0.25])
    for tensor, true in zip(*stepped, strict=True):
        torch.testing.assert_close(tensor, true, rtol=0, atol=0, equal_nan=True)


# ---- what is no tensor of the right kind --------------------------------------------------------------------
