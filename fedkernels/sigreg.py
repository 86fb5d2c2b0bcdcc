"""SIGReg: how far representations are from an isotropic Gaussian, along random directions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkernels.internal import checks
from fedkernels.internal.autograd import has_tangent, is_transformed
from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference.sigreg import sigreg as _reference
from fedkernels.reference.sigreg import unit

_CHUNK = 1 << 18  # projections at a time: their cosines and sines stay in a second-level cache


def sigreg(rows: Tensor, directions: Tensor, *, points: int = 17, limit: float = 5.0) -> Tensor:
    """SIGReg of B representations: near 1 where they are samples of a standard normal distribution, else larger.

    ``mean_s B * integral |phi_s(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt`` with ``phi_s(t) = mean_i exp(i t x_i . a_s)``

    This is the statistic of Epps and Pulley along each unit direction a_s, its integral over [-limit, limit] by the
    trapezoidal rule. Along enough directions only the isotropic Gaussian has 0: so it holds back collapse, and features
    that correlate, without other samples to compare with. Source: Balestriero and LeCun 2025, "LeJEPA: Provable and
    Scalable Self-Supervised Learning Without the Heuristics", Algorithm 1. Take views one at a time, as the paper does,
    and average: views of one image are no independent samples. Draw new directions in every step.

    The integrand is even and 0 at 0, so (points - 1) / 2 points are computed, by rotations of the first one. Rows are
    taken in parts, and once more in the backward pass: beside the inputs, the B x S projections that wait for it and
    their gradient, it takes some MB however many rows and points there are. torch.func's transforms, forward mode and
    torch.export take the reference, which holds B x S x points complex numbers; a second derivative holds half of that.

    Args:
        rows: [B, d], float16, bfloat16, float32 or float64, any strides.
        directions: [d, S] of one of these dtypes, columns of any positive length, as ``torch.randn(d, S)`` draws them;
            they get no gradient.
        points: odd, at least 3; the paper's 17.
        limit: a positive, finite number; the paper's 5.

    Returns:
        A scalar, float64 where rows or directions are, else float32; sums over rows are float64. It does not depend on
        the order of the rows, and ``fedkernels.distributed.sigreg`` gives the same for rows that several processes
        share, both up to rounding. NaN in gives NaN out.

    Raises:
        TypeError: rows or directions is not a floating tensor, points or limit not a number.
        ValueError: B, d or S is 0, sizes or devices that do not agree, points or limit out of range.
    """
    of_rule = check(rows, directions, points, limit)
    checks.not_empty("rows", rows, (0,), "B")
    if is_transformed() or has_tangent(rows) or torch.compiler.is_exporting():
        return _reference(rows, directions, 2 * of_rule.half + 1, of_rule.half * of_rule.step)
    return statistic(sums(rows, directions, of_rule), len(rows), of_rule).to(compute_dtype(rows, directions))


class Rule(NamedTuple):
    """The points of the integral that are above 0: k * step for k from 1 to half."""

    half: int
    step: float


def check(rows: Tensor, directions: Tensor, points: int, limit: float) -> Rule:
    """Raises what `sigreg` raises, but for B = 0."""
    checks.floating("rows", rows, ndim=2, layout="[B, d]")
    checks.floating("directions", directions, ndim=2, layout="[d, S]")
    checks.not_empty("directions", directions, (0, 1), "d or S")
    if directions.shape[0] != rows.shape[1]:
        raise ValueError(f"directions must have the d = {rows.shape[1]} columns of rows as rows, got {len(directions)}")
    checks.same_device(rows=rows, directions=directions)
    points = checks.integer("points", points)
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points must be odd and at least 3, got {checks.short(points)}")
    count = (points - 1) // 2
    return Rule(count, checks.positive("limit", limit) / count)


def sums(rows: Tensor, directions: Tensor, rule: Rule) -> Tensor:
    """The sums over rows of cosines and sines of the projections times each point, float64 [2, half, S]."""
    dtype = compute_dtype(rows, directions)
    with no_autocast(rows):
        found: Tensor = _Sums.apply(_Projections.apply(rows.to(dtype), unit(directions, dtype)), rule)
        return found


def statistic(sums: Tensor, count: Tensor | int, rule: Rule) -> Tensor:
    """The mean statistic, float64 [], of the sums over `count` rows."""
    t = rule.step * torch.arange(1, rule.half + 1, dtype=torch.float64, device=sums.device)
    wanted = (-t.square() / 2).exp()
    weights = 2 * rule.step * wanted  # of both signs of a point
    weights[-1] /= 2
    cosines, sines = sums / count
    distances = (cosines - wanted[:, None]).square() + sines.square()
    return (weights @ distances).mean() * count


class _Projections(torch.autograd.Function):
    """A product whose gradient autocast does not narrow either. All derivatives of both functions have derivatives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, along: Tensor) -> Tensor:
        ctx.save_for_backward(along)
        return rows @ along

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (along,) = ctx.saved_tensors
        with no_autocast(grad):
            return grad @ along.T, None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projections: Tensor, rule: Rule) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(projections)
        found = projections.new_zeros((2, rule.half, projections.shape[1]), dtype=torch.float64)
        for part in _parts(projections):
            for k, (cosine, sine) in enumerate(_turns(part, rule)):
                found[0, k] += cosine.sum(0, dtype=torch.float64)
                found[1, k] += sine.sum(0, dtype=torch.float64)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (projections,) = ctx.saved_tensors
        t = ctx.rule.step * torch.arange(1, ctx.rule.half + 1, dtype=torch.float64, device=grad.device)
        of_cosines, of_sines = (grad * t[:, None]).to(projections.dtype)
        result = torch.zeros_like(projections)
        # Autograd takes no change of several views of one tensor: a second derivative needs parts of their own.
        results = [part.clone() for part in _parts(result)] if torch.is_grad_enabled() else _parts(result)
        for part, to in zip(_parts(projections), results, strict=True):
            for k, (cosine, sine) in enumerate(_turns(part, ctx.rule)):
                to.addcmul_(cosine, of_sines[k]).addcmul_(sine, of_cosines[k], value=-1)
        return torch.cat(results) if torch.is_grad_enabled() else result, None


def _parts(projections: Tensor) -> tuple[Tensor, ...]:
    return projections.split(max(_CHUNK // projections.shape[1], 1))


def _turns(projections: Tensor, rule: Rule) -> Any:
    """Yields cos(k x) and sin(k x) for k = 1, 2, ...: one turn after the other."""
    angles = projections * rule.step
    cosine, sine = first = angles.cos(), angles.sin()
    yield first
    for _ in range(rule.half - 1):
        cosine, sine = (
            (cosine * first[0]).addcmul_(sine, first[1], value=-1),
            (sine * first[0]).addcmul_(cosine, first[1]),
        )
        yield cosine, sine
