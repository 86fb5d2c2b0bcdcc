"""One rank's keys at a time: they travel from each rank to the next, and so do their gradients.

After s steps a rank holds the keys of the rank s places before it. The next keys are sent and received while
the present ones are in use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

_KEYS, _GRADIENTS = 0, 1  # tags of the messages


def visit_keys(
    key: Tensor, key_rows: list[int], group: dist.ProcessGroup, visit: Callable[[int, Tensor], None]
) -> None:
    """Calls ``visit(owner, keys)`` for each rank `owner` with its keys [key_rows[owner], d]."""
    rank, ranks = group.rank(), group.size()
    keys = key.contiguous()
    for step in range(ranks):
        if step == ranks - 1:
            visit((rank - step) % ranks, keys)
            return
        arriving = key.new_empty(key_rows[(rank - step - 1) % ranks], key.shape[1])
        transfers = _pass_on(keys, arriving, group, _KEYS)
        visit((rank - step) % ranks, keys)
        _wait(transfers)
        keys = arriving


def sum_key_gradients(
    key: Tensor, key_rows: list[int], group: dist.ProcessGroup, gradient: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The sum over the ranks of ``gradient(owner, keys)``, for this rank's keys.

    `gradient` returns what this rank's queries contribute to the gradient in `keys`, in their shape. The sum for a
    rank's keys follows them one step behind and is back at that rank after the last step.
    """
    ranks = group.size()
    arriving_sum: Tensor | None = None
    sum_transfers: list[dist.Work] = []
    leaving_sum: Tensor | None = None

    def contribute(owner: int, keys: Tensor) -> None:
        nonlocal arriving_sum, sum_transfers, leaving_sum
        total = gradient(owner, keys).contiguous()
        if arriving_sum is not None:
            _wait(sum_transfers)
            total += arriving_sum
        if ranks == 1:
            arriving_sum = total
            return
        leaving_sum = total  # must live until it is sent
        arriving_sum = total.new_empty(key_rows[(owner - 1) % ranks], key.shape[1])
        sum_transfers = _pass_on(leaving_sum, arriving_sum, group, _GRADIENTS)

    visit_keys(key, key_rows, group, contribute)
    _wait(sum_transfers)
    assert arriving_sum is not None
    return arriving_sum


def _pass_on(leaving: Tensor, arriving: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Starts to send `leaving` to the next rank and to receive `arriving` from the one before."""
    rank, ranks = group.rank(), group.size()
    following = dist.get_global_rank(group, (rank + 1) % ranks)
    preceding = dist.get_global_rank(group, (rank - 1) % ranks)
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, leaving, following, group, tag),
            dist.P2POp(dist.irecv, arriving, preceding, group, tag),
        ]
    )


def _wait(transfers: list[dist.Work]) -> None:
    for transfer in transfers:
        transfer.wait()
