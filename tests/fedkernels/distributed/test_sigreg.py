"""SIGReg of all ranks together: however rows are dealt to them, value and gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist

import fedkernels
from fedkernels.distributed import sigreg
from tests.fedkernels.distributed.ranks import Ranks

ROWS, DIRECTIONS = (
    torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() for shape in ((41, 6), (6, 9))
)


def of_part(sizes: list[int], factors: list[float], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Each rank has as many rows, its value counts so often, and its own directions are not those of the first.

    Returns the value, its gradient, and that of the gradients' squares.
    """
    rank = dist.get_rank()
    rows = ROWS.to(dtype).split(sizes)[rank].clone().requires_grad_()
    directions = (DIRECTIONS if rank == 0 else -DIRECTIONS.flip(1)).to(dtype)
    given = directions.clone()
    value = sigreg(rows, directions)
    (gradient,) = torch.autograd.grad(factors[rank] * value, rows, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), rows)
    assert torch.equal(directions, given)  # the caller's own, which the first rank's do not overwrite
    return value.detach(), gradient.detach(), second


def of_bad_part(kind: str) -> str:
    last = dist.get_rank() == dist.get_world_size() - 1
    rows, directions = torch.ones(0 if kind == "rows" else 3, 4), torch.ones(4, 5 if kind == "S" and last else 6)
    rows.requires_grad_(kind == "gradient" and last)
    others = {"points": 5} if kind == "points" else {"limit": 4.0} if kind == "limit" else {}
    with pytest.raises(ValueError, match="rank") as error:
        sigreg(rows, directions, **others if last else {})
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("even", [True, False])
def test_equals_one_process(ranks: Ranks, even: bool, dtype: torch.dtype) -> None:
    count = len(ranks.pipes)
    sizes = [41 // count] * count if even else [0] * (count - 1)
    sizes += [41 - sum(sizes)] if not even else []
    sizes[0] += 41 - sum(sizes)
    factors = [1.0 + rank for rank in range(count)]
    values, gradients, second = zip(*ranks(of_part, sizes, factors, dtype), strict=True)
    rows = ROWS.to(dtype).requires_grad_()
    truth = fedkernels.sigreg(rows, DIRECTIONS.to(dtype))
    (of_truth,) = torch.autograd.grad(sum(factors) * truth, rows, create_graph=True)
    (of_squares,) = torch.autograd.grad(of_truth.square().sum(), rows, retain_graph=True)
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-6, "atol": 1e-6}
    for value in values:
        torch.testing.assert_close(value, truth.detach(), **tolerance)
    torch.testing.assert_close(torch.cat(gradients), of_truth.detach(), **tolerance)
    tolerance["atol"] *= of_squares.abs().max().item()
    torch.testing.assert_close(torch.cat(second), of_squares, **tolerance)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rows", "at least one rank must have rows"),
        ("S", "number of directions S must be"),
        ("points", "points must be the same on all ranks, got 17, "),
        ("limit", "limit must be the same on all ranks, got 5, "),
        ("gradient", "whether rows require a gradient must be the same on all ranks"),
    ],
)
def test_all_ranks_refuse_what_does_not_fit(ranks: Ranks, kind: str, message: str) -> None:
    assert all(message in told for told in ranks(of_bad_part, kind))


def test_one_rank(one_rank: None) -> None:
    assert torch.equal(sigreg(ROWS, DIRECTIONS), fedkernels.sigreg(ROWS, DIRECTIONS))
