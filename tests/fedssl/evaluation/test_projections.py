"""The sphere, the covariance's singular values and t-SNE, against values found by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedssl.evaluation.projections import log_covariance_singular_values, sphere_coverage, sphere_points, tsne_together


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_log_singular_values_of_the_covariance_by_hand():
    # normalised: +-e1 and +-e2, whose covariance is diag(1/2, 1/2, 0)
    points = torch.tensor([[2.0, 0, 0], [-3, 0, 0], [0, 1, 0], [0, -1, 0]])
    found = log_covariance_singular_values(points)
    assert found.tolist() == pytest.approx([math.log(0.5), math.log(0.5), math.log(1e-12)])
    assert log_covariance_singular_values(points, top=1).tolist() == pytest.approx([math.log(0.5)])
    # one point: no variance at all
    assert log_covariance_singular_values(torch.ones(4, 2)).tolist() == pytest.approx([math.log(1e-12)] * 2)


def test_three_dimensions_are_only_turned():
    features = normal(20, 3)
    unit = features.double() / features.double().norm(dim=1, keepdim=True)
    points = sphere_points(features)
    torch.testing.assert_close(points @ points.T, unit @ unit.T)


def test_a_point_and_an_arc_stay_what_they_are():
    one = torch.tensor([[3.0, 4, 0, 0, 0], [6, 8, 0, 0, 0]])
    torch.testing.assert_close(sphere_points(one), torch.tensor([[1.0, 0, 0]] * 2, dtype=torch.float64))
    angle = torch.linspace(-0.6, 0.6, 30, dtype=torch.float64)
    plane = torch.linalg.qr(normal(7, 2).double()).Q
    points = sphere_points(2.5 * torch.stack([angle.cos(), angle.sin()], dim=1) @ plane.T)
    torch.testing.assert_close(points[:, 2], torch.zeros(30, dtype=torch.float64), atol=1e-7, rtol=0)
    torch.testing.assert_close(points[:, 0], angle.cos())
    torch.testing.assert_close(points[:, 1].abs(), angle.sin().abs())


def test_the_first_axis_points_at_the_middle_whatever_the_dimension():
    features = normal(50, 1) + 5
    assert sphere_points(features).tolist() == [[1.0, 0.0, 0.0]] * 50
    assert sphere_points(-features).tolist() == [[1.0, 0.0, 0.0]] * 50
    assert sphere_points(normal(50, 12) + 0.5)[:, 0].mean() > 0.5
    # a row without a direction is zero
    assert sphere_points(torch.tensor([[0.0, 0], [1, 0]])).tolist() == [[0, 0, 0], [1, 0, 0]]


def test_coverage_of_a_point_a_half_and_all():
    assert sphere_coverage(torch.tensor([[0.0, 0, 1]] * 5)) == 1 / 200
    points = torch.nn.functional.normalize(normal(5000, 3), dim=1)
    assert sphere_coverage(points) == 1.0
    half = points[points[:, 2] > 0]
    assert sphere_coverage(half) == pytest.approx(0.5, abs=0.1)  # cells on the equator count whole
    # 200 points in 200 cells: 1 - (1 - 1/200)^200 of them are hit
    assert sphere_coverage(points[:200]) == pytest.approx(1 - (1 - 1 / 200) ** 200, abs=0.07)


def test_tsne_puts_alike_near_alike_and_repeats():
    centres = 10 * torch.eye(3, 8)
    features = centres.repeat(10, 1) + 0.1 * normal(30, 8)
    other = features + 0.01 * normal(30, 8, seed=1)
    first, second = tsne_together(features, other, seed=3)
    assert first.shape == second.shape == (30, 2)
    nearest = torch.cdist(second, first).argmin(dim=1)
    assert (nearest % 3 == torch.arange(30) % 3).all()
    torch.testing.assert_close(tsne_together(features, other, seed=3), (first, second))


def test_tsne_of_a_collapsed_representation_does_not_fail():
    first, second = tsne_together(torch.ones(8, 4), torch.ones(6, 4), seed=0)
    assert torch.isfinite(torch.cat([first, second])).all()
