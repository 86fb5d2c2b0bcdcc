"""The spectrum against matrices whose singular values and effective rank are known."""

import math

import numpy as np
import pytest
import torch

from fedssl.errors import UserError
from fedssl.evaluation.metrics import effective_rank, singular_values


def features_with_spectrum(values, samples=40, dimension=7, seed=0):
    """float64 [samples, dimension] whose centred matrix over sqrt(samples) has the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(samples, len(values), generator=generator, dtype=torch.float64)
    left = torch.linalg.qr(draw - draw.mean(dim=0)).Q  # columns orthonormal and of mean zero
    right = torch.linalg.qr(torch.randn(dimension, len(values), generator=generator, dtype=torch.float64)).Q
    return samples**0.5 * left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T


def test_singular_values_are_those_built_in():
    values = [3.0, 2.0, 0.5]
    got = singular_values(features_with_spectrum(values) + 100.0)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor([*values, 0, 0, 0, 0], dtype=torch.float64), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(50, 6), (6, 50)])
def test_squares_are_the_eigenvalues_of_the_covariance(shape):
    features = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    covariance = np.atleast_2d(np.cov(features.double().numpy(), rowvar=False, bias=True))
    eigenvalues = np.sort(np.linalg.eigvalsh(covariance))[::-1][: min(shape)]
    got = singular_values(features)
    assert got.shape == (min(shape),)
    np.testing.assert_allclose(got.square().numpy(), eigenvalues, atol=1e-12)


def test_repeating_the_samples_changes_nothing():
    features = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(singular_values(features.repeat(3, 1)), singular_values(features))


@pytest.mark.parametrize("rank", [1, 2, 5, 7])
def test_equal_singular_values_give_the_rank(rank):
    assert effective_rank(features_with_spectrum([2.0] * rank)) == pytest.approx(rank)


def test_effective_rank_by_hand():
    # p = (1/2, 1/4, 1/4): the entropy is (1/2 + 1/2) log 2 + 1/2 log 2 = 3/2 log 2.
    assert effective_rank(features_with_spectrum([2.0, 1.0, 1.0])) == pytest.approx(2**1.5)
    shares = [0.7, 0.2, 0.1]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert effective_rank(features_with_spectrum([70.0, 20.0, 10.0])) == pytest.approx(expected)


def test_effective_rank_ignores_scale_shift_and_rotation():
    features = features_with_spectrum([3.0, 2.0, 0.5])
    expected = effective_rank(features)
    rotation = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).Q
    assert effective_rank(1e-6 * features @ rotation + 3.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "features",
    [
        torch.zeros(10, 3),
        torch.full((10, 3), 0.1),
        torch.rand(1, 5),
        torch.rand(1, 5).expand(30, 5).half(),
        # A collapsed encoder as it comes out of float32 arithmetic: the last bit differs from row to row.
        torch.full((64, 32), 0.3) * (1 + 1e-7 * torch.randn(64, 32, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["zero", "constant", "one sample", "half precision", "rounding noise"],
)
def test_collapsed_representations_have_effective_rank_one(features):
    assert effective_rank(features) == 1.0


def test_small_variation_around_a_large_mean_is_no_collapse():
    features = 1e-3 * torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)) + 1.0
    assert effective_rank(features) == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("function", [singular_values, effective_rank])
@pytest.mark.parametrize(
    ("features", "message"),
    [
        (torch.tensor([[1.0, math.nan]]), "features: contains NaN"),
        (torch.tensor([[1.0, -math.inf]]), "features: contains NaN or infinite"),
    ],
)
def test_bad_input_is_named(function, features, message):
    with pytest.raises(UserError, match=message):
        function(features)
