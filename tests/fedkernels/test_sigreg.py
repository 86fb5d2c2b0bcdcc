"""SIGReg against its definition, and what does not change it."""

import math
import sys

import pytest
import torch

from fedkernels import sigreg
from fedkernels.reference.sigreg import sigreg as reference
from tests.fedkernels.test_cuda import randn


def with_gradient(function, rows, *arguments, **options):
    rows = rows.clone().requires_grad_()
    value = function(rows, *arguments, **options)
    return value.detach(), *torch.autograd.grad(value, rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("points", "limit"), [(17, 5.0), (3, 1.0), (129, 8.0)])
def test_equals_the_definition(points, limit, dtype, monkeypatch):
    """In parts of 12 rows, the last one smaller. Halves are widened."""
    monkeypatch.setattr(sys.modules["fedkernels.sigreg"], "_CHUNK", 70)
    rows, directions = (1.7 * randn(53, 6) + 0.3).to(dtype), 3 * randn(6, 5, seed=1)
    wide, rtol, atol = (dtype, 1e-12, 1e-14) if dtype == torch.float64 else (torch.float32, 1e-5, 1e-6)
    found = with_gradient(sigreg, rows, directions.to(wide), points=points, limit=limit)
    truth = with_gradient(reference, rows.double(), directions, points=points, limit=limit)
    assert [one.dtype for one in found] == [wide, dtype]
    for one, true, rounding in zip(found, truth, (0, torch.finfo(dtype).eps), strict=True):
        torch.testing.assert_close(one.double(), true, rtol=max(rtol, rounding), atol=atol)


def test_integral_of_one_point_is_known():
    """All rows 0: phi = 1, and B * integral (1 - g)^2 g dt with g = exp(-t^2 / 2), which is a sum of Gaussians'."""
    exact = 20 * math.sqrt(2 * math.pi) * (1 - 2 / math.sqrt(2) + 1 / math.sqrt(3))
    value = sigreg(torch.zeros(20, 4), randn(4, 3).float(), points=65, limit=9.0)
    assert value.item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("factor", [1e-40, 1e-20, 9e37])
@pytest.mark.parametrize("function", [sigreg, reference])
def test_the_length_of_a_direction_does_not_count(function, factor):
    rows, directions = randn(11, 5).float(), randn(5, 4, seed=1)
    found = function(rows, (factor * directions).float())
    torch.testing.assert_close(found, function(rows, directions.float()), rtol=1e-4, atol=0)


def test_nan_comes_out():
    rows = torch.ones(4, 3)
    rows[2, 1] = torch.nan
    assert sigreg(rows, torch.ones(3, 2)).isnan()


def test_autocast_does_not_narrow_a_backward_pass_inside_it():
    rows, directions = randn(11, 5).float(), randn(5, 4, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradient(sigreg, rows, directions)
    torch.testing.assert_close(found, with_gradient(sigreg, rows, directions), rtol=0, atol=0)


def test_a_first_derivative_puts_no_parts_together(monkeypatch):
    """Which would hold the B x S numbers once more."""
    monkeypatch.setattr(torch, "cat", None)
    assert with_gradient(sigreg, randn(7, 6), randn(6, 5, seed=1))[1].shape == (7, 6)


def test_second_derivatives_are_those_of_the_definition(monkeypatch):
    monkeypatch.setattr(sys.modules["fedkernels.sigreg"], "_CHUNK", 15)
    rows, directions = randn(7, 6).requires_grad_(), randn(6, 5, seed=1)

    def second(function):
        (gradient,) = torch.autograd.grad(function(rows, directions), rows, create_graph=True)
        return torch.autograd.grad(gradient.square().sum() + rows.sum(), rows)

    torch.testing.assert_close(second(sigreg), second(reference), rtol=1e-12, atol=1e-14)
