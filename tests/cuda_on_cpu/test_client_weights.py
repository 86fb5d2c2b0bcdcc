"""csrc/cuda/client_weights.cu against quadprog and the reference."""

import pytest
import torch

from fedkernels.reference.client_weights import client_weights, residual
from tests.fedkernels.test_client_weights import assert_optimal, by_quadprog, gram_of

LARGE, SMALL = 227 << 10, 99 << 10  # bytes of shared memory: the matrix lies there, or not


def solve(bindings, grams, tol=1e-8, shared_limit=LARGE):
    return bindings.results(torch.ops.fedkernels.client_weights.default, grams, tol, shared_limit=shared_limit)


@pytest.mark.parametrize(
    ("clients", "entries", "correlation", "spread", "shared_limit"),
    [
        (15, 37, 5.0, 1.0, LARGE),
        (33, 73, 0.0, 1.0, LARGE),
        # Blocks of two problems take turns, so that each meets what the other writes to memory that is not its own.
        (128, 300, 0.3, 0.0, LARGE),
        (101, 300, 0.3, 0.0, SMALL),
    ],
)
def test_equals_quadprog(bindings, clients, entries, correlation, spread, shared_limit):
    grams = torch.stack([gram_of(clients, entries, correlation, seed, spread) for seed in range(2)])
    found = solve(bindings, grams, shared_limit=shared_limit)
    for gram, weights in zip(grams, found, strict=True):
        assert_optimal(gram, weights)
        torch.testing.assert_close(weights, by_quadprog(gram), rtol=0, atol=1e-7)
        torch.testing.assert_close(weights, client_weights(gram), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_grams(bindings, dtype):
    """Of full rank, and of a rank that rounding hides: as near to the optimum as what was lost by rounding allows."""
    full = gram_of(6, 20, 1.0).to(dtype)
    weights = solve(bindings, full[None])
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[0].double(), client_weights(full.double()), rtol=0, atol=1e-7)
    grams = torch.stack([gram_of(8, 3, 0.0, seed) for seed in (12, 39, 47)]).to(dtype)
    for gram, weights in zip(grams.double(), solve(bindings, grams).double(), strict=True):
        lost = -torch.linalg.eigvalsh(gram)[0]
        assert lost > 0
        assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
        assert residual(gram, weights) <= 10 * lost


@pytest.mark.parametrize(("clients", "entries", "seeds"), [(33, 17, (12, 13, 14)), (40, 21, (4, 5, 16, 17))])
def test_more_clients_than_entries_have_the_smallest_norm_too(bindings, clients, entries, seeds):
    """Where pivoting ran out of rounds, those of seeds 13, 5 and 17 ended at twice the smallest norm and more."""
    grams = torch.stack([gram_of(clients, entries, 0.0, seed) for seed in seeds])
    norms = [(weights @ (gram @ weights)) for gram, weights in zip(grams, solve(bindings, grams), strict=True)]
    best = [(weights @ (gram @ weights)) for gram, weights in zip(grams, map(client_weights, grams), strict=True)]
    traces = grams.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(torch.stack(norms) / traces, torch.stack(best) / traces, rtol=1e-6, atol=1e-10)
