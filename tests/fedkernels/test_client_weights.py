"""client_weights against quadprog's active-set solver and the optimality conditions."""

import numpy as np
import pytest
import quadprog
import torch

from fedkernels import client_weights
from fedkernels.internal import native
from fedkernels.reference import client_weights as reference


def gram_of(clients, entries, correlation=0.0, seed=0, spread=0.0):
    """Updates with a common part (correlation) and lengths that differ by orders of magnitude (spread)."""
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(clients, entries, generator=generator, dtype=torch.float64)
    deltas += correlation * torch.randn(entries, generator=generator, dtype=torch.float64)
    deltas *= torch.randn(clients, 1, generator=generator, dtype=torch.float64).mul(spread).exp()
    return deltas @ deltas.T


def by_quadprog(gram, bounds=None):
    clients = len(gram)
    bounds = torch.zeros(clients).double() if bounds is None else bounds
    ridge = 1e-13 * float(gram.trace()) * np.eye(clients)  # it demands a definite matrix
    constraints, limits = np.c_[np.ones(clients), np.eye(clients)], np.r_[1.0, bounds.numpy()]
    p = quadprog.solve_qp(2 * (gram.numpy() + ridge), np.zeros(clients), constraints, limits, 1)[0]
    # It keeps to its constraints within 1e-10 only.
    feasible = torch.from_numpy(p).clamp(min=bounds)
    return feasible / feasible.sum()


def assert_optimal(gram, p, rtol=1e-10):
    """On the simplex, and p'Gp = min_k (Gp)_k: all clients with weight have the least gradient."""
    assert (p >= 0).all()
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    gradient = gram @ p
    assert p @ gradient - gradient.min() <= rtol * gram.diagonal().min() + 1e-15 * gram.trace()


@pytest.mark.parametrize(("correlation", "spread"), [(0.0, 0.0), (1.0, 1.0), (5.0, 0.0), (5.0, 1.0)])
@pytest.mark.parametrize("clients", [2, 3, 7, 15, 30])
def test_equals_quadprog(clients, correlation, spread):
    gram = gram_of(clients, 60, correlation, clients, spread)
    p, truth = client_weights(gram), by_quadprog(gram)
    assert_optimal(gram, p)
    torch.testing.assert_close(p, truth, rtol=0, atol=1e-7)
    torch.testing.assert_close(p @ gram @ p, truth @ gram @ truth, rtol=1e-9, atol=0)


@pytest.mark.parametrize("correlation", [0.3, 2.0])
@pytest.mark.parametrize(("clients", "rank"), [(5, 3), (20, 6), (30, 25), (100, 40)])
def test_deficient_rank(clients, rank, correlation):
    """The weights need not be unique; the optimum is."""
    gram = gram_of(clients, rank, correlation, clients)
    p, truth = client_weights(gram), by_quadprog(gram)
    assert_optimal(gram, p)
    assert p @ gram @ p <= truth @ gram @ truth + 1e-12 * gram.diagonal().min()


def test_duplicate_clients_share():
    generator = torch.Generator().manual_seed(1)
    deltas = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    deltas[3] = deltas[5] = deltas[1]
    gram = deltas @ deltas.T
    p = client_weights(gram)
    assert_optimal(gram, p)
    torch.testing.assert_close(p[[1, 3, 5]], p[1].expand(3))
    alone = client_weights(gram[[0, 1, 2, 4]][:, [0, 1, 2, 4]])
    torch.testing.assert_close(p[[1, 3, 5]].sum(), alone[1])
    torch.testing.assert_close(p[[0, 2, 4]], alone[[0, 2, 3]])


@pytest.mark.parametrize(("clients", "correlation"), [(3, 0.0), (10, 1.0), (40, 5.0)])
def test_admm_converges_without_the_exact_end(clients, correlation, monkeypatch):
    """The active-set end would hide an iteration that goes astray."""
    monkeypatch.setattr(reference, "_polish", lambda gram, p: p)
    monkeypatch.setattr(reference, "_MAX_ITERATIONS", 500)
    gram = gram_of(clients, 60, correlation, clients)
    assert_optimal(gram, reference.client_weights(gram), rtol=1e-8)


def test_degenerate_grams():
    assert client_weights(torch.tensor([[3.0]])).tolist() == [1]
    assert client_weights(torch.tensor([[0.0]])).tolist() == [1]
    assert client_weights(torch.zeros(4, 4)).tolist() == [0.25] * 4
    torch.testing.assert_close(client_weights(torch.ones(5, 5)), torch.full((5,), 0.2))
    assert client_weights(torch.diag(torch.tensor([1.0, 0.0, 2.0]))).tolist() == [0, 1, 0]  # one did not move


def test_a_batch_is_its_problems():
    grams = torch.stack([gram_of(6, 20, 1.0, seed) for seed in range(4)]).view(2, 2, 6, 6)
    assert torch.equal(
        client_weights(grams), torch.stack([client_weights(gram) for gram in grams.flatten(0, 1)]).view(2, 2, 6)
    )
    assert client_weights(grams[:0]).shape == (0, 2, 6)


@pytest.fixture
def exact_solves(monkeypatch):
    """One entry for each exact solve of the reference: there is one in 100 iterations."""
    calls, polish = [], reference._polish
    monkeypatch.setattr(reference, "_polish", lambda gram, p: calls.append(1) or polish(gram, p))
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("clients", "rank"), [(7, 1), (12, 3), (40, 10), (100, 10)])
def test_rounding_may_make_a_gram_indefinite(clients, rank, dtype, exact_solves):
    """More clients than a direction has entries, whose optimum is 0: the nearest definite matrix is solved, soon."""
    gram = gram_of(clients, rank, 0.0, clients).to(dtype)
    eigenvalues, vectors = torch.linalg.eigh(gram.double())
    assert eigenvalues[0] < 0
    nearest = (vectors * eigenvalues.clamp(min=0)) @ vectors.T
    p = reference.client_weights(gram.double())
    assert len(exact_solves) <= 10
    gradient = nearest @ p
    assert p @ gradient - gradient.min() <= 1e-8 * gram.diagonal().min() + 1e-13 * gram.double().trace()


def test_lengths_apart_by_many_orders_of_magnitude(exact_solves):
    """The tolerance is below what float64 can tell: the best that there is, and soon."""
    for seed in range(20):
        gram = gram_of(36, 22, 0.0, seed, 2.5)
        gradient = gram @ (p := reference.client_weights(gram))
        assert p @ gradient - gradient.min() <= 1e-14 * gram.trace()
        assert len(exact_solves) <= 10
        exact_solves.clear()


def test_a_tolerance_that_is_missed_is_told(monkeypatch):
    monkeypatch.setattr(reference, "_polish", lambda gram, p: torch.full_like(p, 1 / len(p)))
    monkeypatch.setattr(reference, "_MAX_STALLED", 1)
    with pytest.warns(UserWarning, match=r"p'Gp - min_k \(Gp\)_k is .* of the trace of gram"):
        reference.client_weights(gram_of(40, 60, 5.0, 1, 2.0))


def broken(i, j, value):
    gram = torch.eye(3)
    gram[i, j] = value
    return gram


@pytest.mark.cpu_only(reason="the weights are NaN")
@pytest.mark.parametrize(
    ("gram", "message"),
    [
        (broken(0, 0, torch.nan), "gram must be finite, got 1 entries"),
        (torch.stack([torch.eye(3), broken(1, 2, torch.inf)]), "gram must be finite"),
        (broken(0, 1, 0.5), "gram must be symmetric"),
        (broken(1, 1, -1.0), "gram must be positive semi-definite, got -1"),
        (torch.eye(2).flip(0), "gram must be positive semi-definite"),
        (torch.tensor([[1.0, 9.0], [-9.0, 1.0]]), "gram must be symmetric"),
    ],
)
@pytest.mark.parametrize("bounded", [None, 0.75, 1.0])  # the sum of lower bounds, which may hide the entries
def test_entries_that_are_refused(gram, message, bounded):
    with pytest.raises(ValueError, match=message):
        client_weights(gram, lower_bounds=bounded and bounded / gram.shape[-1])


@pytest.mark.cpu_only(reason="the weights are NaN")
@pytest.mark.parametrize(("bounds", "message"), [([0.1, -0.1], "-0.1"), ([0.1, torch.nan], "nan"), ([0.9, 0.6], "1.5")])
def test_lower_bounds_that_are_refused(bounds, message):
    with pytest.raises(ValueError, match=f"lower_bounds must .*{message}"):
        client_weights(torch.eye(2), lower_bounds=torch.tensor(bounds))


@pytest.mark.skipif(native.module is None, reason="the module is not compiled")
@pytest.mark.parametrize(("correlation", "spread"), [(0.0, 0.0), (1.0, 0.5)])  # all get weight, or some
@pytest.mark.parametrize("clients", [2, 7, 33, 70, 130])
def test_the_kernel_solves_ordinary_problems_itself(clients, correlation, spread):
    """NaN hands a problem over to the reference, which would hide a fault of the kernel."""
    gram = gram_of(clients, 60 * clients, correlation, clients, spread)
    weights = torch.ops.fedkernels.client_weights(gram, 1e-8)
    assert_optimal(gram, weights)
    if not correlation:
        assert (weights > 0).all()
    for size in (2.3e-308 / gram.diagonal().min(), 1e307 / gram.abs().max()):  # the smallest and the largest numbers
        torch.testing.assert_close(torch.ops.fedkernels.client_weights(gram * size, 1e-8), weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("solve", [reference.client_weights, client_weights])
@pytest.mark.parametrize("largest", [1e-318, 1.7e308])
def test_the_smallest_and_the_largest_numbers(solve, largest):
    gram = torch.tensor([[1 / 3, 1 / 6], [1 / 6, 1.0]]).double()
    torch.testing.assert_close(solve(gram * largest), torch.tensor([5 / 6, 1 / 6]).double(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_lower_bounds_equal_quadprog(part):
    grams = torch.stack([gram_of(8, 20, correlation=1.0, seed=seed, spread=0.5) for seed in range(4)])
    bounds = part / 8 * torch.linspace(0, 2, 8, dtype=torch.float64).expand(4, 8)
    p = client_weights(grams, lower_bounds=bounds)
    torch.testing.assert_close(p.sum(-1), torch.ones(4).double())
    assert (p >= bounds).all()
    for k in range(4):
        best = by_quadprog(grams[k], bounds[k])
        value, least = p[k] @ grams[k] @ p[k], best @ grams[k] @ best
        assert -1e-9 <= (value - least) / least <= 1e-7
        torch.testing.assert_close(client_weights(grams[k], lower_bounds=bounds[k]), p[k], rtol=1e-6, atol=1e-9)
    if part:
        assert not torch.allclose(p, client_weights(grams))


def test_lower_bounds_of_one_number_and_of_the_whole():
    gram = gram_of(5, 20, seed=2)
    equal = client_weights(gram, lower_bounds=0.2)
    torch.testing.assert_close(equal, torch.full((5,), 0.2).double())
    torch.testing.assert_close(client_weights(gram, lower_bounds=0.0), client_weights(gram), rtol=1e-9, atol=1e-12)
    half = client_weights(gram.half().float(), lower_bounds=torch.full((5,), 0.2))  # a sum of 1 but for rounding
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, torch.full((5,), 0.2))
