"""The sliced distance that FedU2's authors released in place of FUR."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.regularizers import sliced_uniformity
from fedssl.regularizers.sliced_uniformity import SlicedUniformity, sliced_distance, tangent_coordinates
from tests.fedssl.regularizers.terms import Local, representations, step_of

SLICED = {"name": "sliced_uniformity"}


def angles(*values):
    """Points of the circle."""
    t = torch.tensor(values)
    return torch.stack([t.cos(), t.sin()], dim=1)


def test_sliced_distance_by_hand():
    """On the circle, from the base (1, 0) along (0, 1), the coordinate of a point is its angle. Points at 0.5 and 0.1,
    samples at 0.7 and -0.2; sorted 0.1, 0.5 against -0.2, 0.7: (0.3^2 + 0.2^2) / 2 = 0.065. From the base (0, 1) along
    (1, 0) the coordinate is pi / 2 - angle: the same distance. Along (0, 3) it is nine times that.
    """
    base = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    direction = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    points, samples = angles(0.5, 0.1), angles(0.7, -0.2)
    expected = torch.tensor([[[0.5], [math.pi / 2 - 0.5]], [[0.1], [math.pi / 2 - 0.1]]])
    torch.testing.assert_close(tangent_coordinates(points, base, direction), expected)
    torch.testing.assert_close(sliced_distance(points, samples, base, direction), torch.full((2,), 0.065))
    both = sliced_distance(torch.stack([points, samples]), samples, base[:1], 3 * direction[:1])
    torch.testing.assert_close(both, torch.tensor([[9 * 0.065], [0.0]]))


def test_the_part_of_a_direction_along_the_base_does_not_count():
    z, samples = (t[:8, :6] for t in representations("random"))
    z, base = F.normalize(z, dim=1), F.normalize(samples[:3], dim=1)
    direction = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    tilted = direction + 7 * base.unsqueeze(1)
    torch.testing.assert_close(
        tangent_coordinates(z, base, direction), tangent_coordinates(z, base, tilted), rtol=1e-4, atol=1e-5
    )


def released_term(points, samples, base, direction):
    """The released term in float64, one tangent space, direction and point after the other.

    For each tangent space: the logarithms of samples and points as (angle / |u|) u with u = z - <z, t> t; their
    products with Gaussian directions; sorted; the mean of the squared differences over directions and points. The sum
    over the tangent spaces is divided by 6.
    """
    total = 0.0
    for t, directions in zip(base.double(), direction.double(), strict=True):
        squares = []
        for v in directions:
            values = []
            for group in (points.double(), samples.double()):
                coordinates = []
                for z in group:
                    u = z - (z @ t) * t
                    coordinates.append(float(torch.acos((z @ t).clamp(-1, 1)) * (u / u.norm()) @ v))
                values.append(sorted(coordinates))
            squares += [(a - b) ** 2 for a, b in zip(*values, strict=True)]
        total += sum(squares) / len(squares)
    return total / 6


def test_the_term_is_the_released_one(monkeypatch):
    """Two views of 5 images in 4 dimensions, weight 0.01, beside the released formula in float64."""
    generator = torch.Generator().manual_seed(3)
    samples, base = (F.normalize(torch.randn(5, 4, generator=generator), dim=1) for _ in range(2))
    direction = torch.randn(5, 6, 4, generator=generator)
    views = [torch.randn(5, 4, generator=generator) for _ in range(2)]
    drawn = iter([samples, base])
    monkeypatch.setattr(sliced_uniformity, "sphere_samples", lambda *_: next(drawn))
    monkeypatch.setattr(torch, "randn", lambda *size, generator, device: direction if size == (5, 6, 4) else None)
    local = Local()
    value = SlicedUniformity(**SLICED).start_round(local)(step_of(*views))
    expected = [released_term(F.normalize(view, dim=1), samples, base, direction) for view in views]
    assert float(value) == pytest.approx(0.01 * sum(expected), rel=1e-5)
    assert local.logged == {"sliced_distance": [pytest.approx(sum(expected) / 2, rel=1e-5)]}


@pytest.mark.parametrize(("rows", "width"), [(128, 512), (50, 128)])
def test_how_much_larger_the_released_term_is_than_the_mean(rows, width):
    """B tangent spaces over 6, and Gaussian directions with d - 1 times the square of a unit tangent vector."""
    z = F.normalize(torch.randn(1, width) + 0.1 * torch.randn(rows, width), dim=1)
    released, mean = (
        float(SlicedUniformity(**SLICED, scale=scale, directions=50).start_round(Local())(step_of(z)))
        for scale in ("released", "mean")
    )
    assert released / mean == pytest.approx(rows * (width - 1) / 6, rel=0.05)


def test_collapsed_points_are_farther_from_uniform_and_the_gradient_is_finite_everywhere():
    term = SlicedUniformity(**SLICED).start_round
    collapsed, random = representations("collapsed")[0], representations("random")[0]
    assert term(Local())(step_of(collapsed)) > 5 * term(Local())(step_of(random))
    base = torch.tensor([[1.0, 0.0, 0.0]])
    z = torch.cat([base, -base]).requires_grad_()  # at the base and opposite to it
    distance = sliced_distance(z, F.normalize(torch.ones(2, 3), dim=1), base, torch.tensor([[[0.0, 1.0, 0.0]]]))
    distance.sum().backward()
    assert z.grad.isfinite().all()


def test_without_a_projector_it_is_refused(tiny):
    with pytest.raises(UserError, match="sliced_uniformity works on the projector's output"):
        build_federation(tiny(objective="supervised", regularizers=[SLICED]))
