"""SIGReg of the rows of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fedkernels.distributed._ranks import all_gather, name_of_group, named_group, same
from fedkernels.internal.autograd import needs_gradient
from fedkernels.reference._precision import compute_dtype
from fedkernels.sigreg import check, statistic, sums


def sigreg(
    rows: Tensor, directions: Tensor, *, points: int = 17, limit: float = 5.0, group: ProcessGroup | None = None
) -> Tensor:
    """SIGReg of the rows that all ranks hold together: every rank gets the value of one process with all of them.

    A mean over the ranks' own values would be another loss: the statistic squares a mean over rows and is multiplied
    with their number. The ranks add up 2 x S x (points - 1) / 2 sums, however many rows they have. See
    ``fedkernels.sigreg`` for the statistic and its source, and ``fedkernels.distributed`` for gradients and what all
    ranks have to do alike.

    Args:
        rows: [B, d], float16, bfloat16, float32 or float64. B may differ from rank to rank, and be 0 on some.
        directions: [d, S]; those of the group's first rank serve all, so each rank may draw its own.
        points: as in ``fedkernels.sigreg``, the same on all ranks; so is limit.
        limit: see there.
        group: the process group; None is the default group.

    Returns:
        A scalar, the same on all ranks.

    Raises:
        TypeError: as ``fedkernels.sigreg``.
        ValueError: as ``fedkernels.sigreg``, before the ranks meet; on all ranks if their d, S, points, limits,
            dtypes or need of gradients differ, or if no rank has rows.
        RuntimeError: torch.distributed is not initialised; what the process group raises if a rank fails.
    """
    rule = check(rows, directions, points, limit)
    ranks = named_group(name_of_group(group))
    dtype = compute_dtype(rows, directions)
    flags = float(dtype == torch.float64), float(needs_gradient(rows))
    numbers = [*rows.shape, directions.shape[1], 2 * rule.half + 1, rule.half * rule.step, *flags]
    own = torch.tensor([numbers], dtype=torch.float64).to(rows.device)
    everyones = own.new_empty(ranks.size(), own.shape[1])
    all_gather(everyones, own, group=ranks)
    counts, *others = everyones.T.tolist()
    names = "the number of columns d", "the number of directions S", "points", "limit", "float64 in an input"
    for name, of_ranks in zip((*names, "whether rows require a gradient"), others, strict=True):
        same(name, [f"{one:g}" for one in of_ranks])
    if not sum(counts):
        raise ValueError(f"at least one rank must have rows, got none on {ranks.size()} ranks")
    directions = directions.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)  # not the caller's
    dist.broadcast(directions, dist.get_global_rank(ranks, 0), group=ranks)
    found = _SumOfRanks.apply(sums(rows, directions, rule), ranks)
    return statistic(found, int(sum(counts)), rule).to(dtype)


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks. The gradient of the sum of all ranks' losses is, in turn, the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        result = own.clone()
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOfRanks.apply(grad, ctx.group), None
