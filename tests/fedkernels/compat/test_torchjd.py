"""fedkernels.compat.torchjd: values with and without TorchJD, and its place among TorchJD's classes."""

import inspect

import pytest
import torch
from torch import nn

from fedkernels.compat import torchjd
from fedkernels.compat.torchjd_aggregators import MinimumNorm, MinimumNormWeighting
from tests.fedkernels.refusals import refusals

JACOBIAN = torch.randn(10, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3
MANY_STEPS = {"epsilon": 1e-12, "max_iters": 20_000}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 6e-8),
        (torch.float16, 3e4),
        (torch.bfloat16, 1e-25),
        (torch.float64, 1e-200),
        (torch.float64, 1e200),
    ],
)
def test_rows_of_any_size(dtype, size):
    """Their squares are out of the dtype's range."""
    matrix = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64).mul(size).to(dtype)
    result = torchjd.MGDA()(matrix)
    assert result.dtype == dtype
    torch.testing.assert_close(result, matrix[0], rtol=1e-6, atol=0)
    opposite = torch.cat([matrix[:1], -matrix[:1]])
    torch.testing.assert_close(torchjd.MGDA().weighting(opposite), torch.full((2,), 0.5, dtype=dtype))


def test_columns_in_several_parts(monkeypatch):
    whole = torchjd.MGDA()(JACOBIAN)
    monkeypatch.setattr(torchjd, "_CHUNK", 7)
    torch.testing.assert_close(torchjd.MGDA()(JACOBIAN), whole)


@pytest.mark.parametrize("clients", [2, 10])
def test_the_weights_are_the_optimum(clients):
    """The original's Frank-Wolfe stops above it: with its defaults, and less so with many steps."""
    jacobian = JACOBIAN[:clients, :30] * torch.logspace(0, 1, clients)[:, None]
    gramian = jacobian @ jacobian.T
    combination, weights = torchjd.MGDA()(jacobian), torchjd.MGDAWeighting()(gramian)
    torch.testing.assert_close(combination, weights @ jacobian)
    ours = float(combination @ combination)
    # All inner products with the combination of least norm are at least its square.
    assert float((jacobian @ combination).min()) >= ours * (1 - 1e-7)
    originals = pytest.importorskip("torchjd.aggregation", reason="torchjd is not installed")
    many_steps, defaults = (
        float(theirs @ gramian @ theirs)
        for theirs in (originals.MGDAWeighting(**options)(gramian) for options in (MANY_STEPS, {}))
    )
    assert ours <= many_steps * (1 + 1e-9) <= defaults * (1 + 2e-9)
    assert ours == pytest.approx(many_steps, rel=1e-3)


@pytest.mark.parametrize(("make", "given"), [(torchjd.MGDA, JACOBIAN), (torchjd.MGDAWeighting, JACOBIAN @ JACOBIAN.T)])
def test_compiles_without_a_graph_break(make, given):
    torch.compiler.reset()
    compiled = torch.compile(make(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), make()(given))


@pytest.mark.parametrize(
    ("matrix", "weights"),
    [
        (torch.tensor([[0.0, 0.0], [1.0, 0.0]]), [1.0, 0.0]),  # a row of norm 0
        (torch.zeros(3, 2), [1 / 3] * 3),
        (torch.zeros(2, 0), [0.5, 0.5]),
        (torch.ones(1, 3), [1.0]),
    ],
)
def test_degenerate_rows(matrix, weights):
    torch.testing.assert_close(torchjd.MGDA().weighting(matrix), torch.tensor(weights))
    torch.testing.assert_close(torchjd.MGDA()(matrix), torch.tensor(weights) @ matrix)


test_bad_input_is_named = refusals(
    (lambda: torchjd.MGDA()(torch.tensor([[1.0, torch.nan]])), ValueError, "matrix must be finite, got nan"),
    (lambda: torchjd.MGDA()(torch.ones(2, 2).int()), TypeError, "matrix must be float16.*got torch.int32"),
    (lambda: torchjd.MGDA()(torch.ones(0, 2)), ValueError, "matrix must not be empty in m"),
    (lambda: torchjd.MGDAWeighting()(torch.full((2, 2), torch.inf)), ValueError, "gramian must be finite, got inf"),
    (lambda: setattr(torchjd.MGDA(), "max_iters", 0), ValueError, "max_iters must be positive, got 0"),
    (lambda: MinimumNorm(lower_bound=-0.1), ValueError, "lower_bound must be positive"),
)


def test_the_former_names_are_the_same_weights_with_a_lower_bound():
    weights = MinimumNormWeighting()(JACOBIAN @ JACOBIAN.T)
    torch.testing.assert_close(MinimumNorm()(JACOBIAN), weights @ JACOBIAN)
    torch.testing.assert_close(MinimumNorm()(JACOBIAN), torchjd.MGDA()(JACOBIAN))
    bounded = MinimumNorm(lower_bound=0.05).weighting(JACOBIAN)
    assert bounded.min() >= 0.05 - 1e-12
    torch.testing.assert_close(torchjd.MGDA(lower_bound=0.05).weighting(JACOBIAN), bounded)


def test_it_is_one_of_torchjds():
    aggregation = pytest.importorskip("torchjd.aggregation")
    assert issubclass(torchjd.MGDA, aggregation.GramianWeightedAggregator)
    assert issubclass(torchjd.MGDAWeighting, aggregation.Weighting)
    for name in ("MGDA", "MGDAWeighting"):
        ours, original = (getattr(library, name) for library in (torchjd, aggregation))
        parameters = inspect.signature(original).parameters
        assert list(inspect.signature(ours).parameters.items())[: len(parameters)] == list(parameters.items())
        same, theirs = ours(0.1, 7), original(0.1, 7)
        assert (same.epsilon, same.max_iters) == (theirs.epsilon, theirs.max_iters) == (0.1, 7)
        assert repr(theirs).startswith(repr(same).partition("\n")[0])
        assert str(same) == str(theirs)


@pytest.mark.parametrize("optimize", [False, True])
def test_jac_to_grad_gives_the_weights_and_runs_hooks(optimize):
    autojac = pytest.importorskip("torchjd.autojac")
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    aggregator = torchjd.MGDA()
    calls = []
    aggregator.gramian_weighting.register_forward_hook(lambda *_: calls.append(1))
    autojac.backward([parameter @ torch.tensor([1.0, 0.0]), parameter @ torch.tensor([0.0, 2.0])])
    weights = autojac.jac_to_grad([parameter], aggregator, optimize_gramian_computation=optimize)
    torch.testing.assert_close(weights, torch.tensor([0.8, 0.2]))
    torch.testing.assert_close(parameter.grad, torch.tensor([0.8, 0.4]))
    assert calls == [1]
