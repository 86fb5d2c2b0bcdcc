"""All ranks' keys at once: an all-gather, and a reduce-scatter for their gradients."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fedkernels.distributed._ranks import all_gather, reduce_scatter


def visit_keys(
    key: Tensor, key_rows: list[int], group: dist.ProcessGroup, visit: Callable[[int, Tensor], None]
) -> None:
    """Calls ``visit(owner, keys)`` for each rank `owner` with its keys [key_rows[owner], d]."""
    for owner, keys in enumerate(gather(key, key_rows, group)):
        visit(owner, keys[: key_rows[owner]])


def sum_key_gradients(
    key: Tensor, key_rows: list[int], group: dist.ProcessGroup, gradient: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """The sum over the ranks of ``gradient(owner, keys)``, for this rank's keys.

    `gradient` returns what this rank's queries contribute to the gradient in `keys`, in their shape.
    """
    everyones = gather(key, key_rows, group)
    gradients = None
    for owner, rows in enumerate(key_rows):
        contribution = gradient(owner, everyones[owner, :rows])
        if gradients is None:
            gradients = contribution.new_zeros(everyones.shape)
        gradients[owner, :rows] = contribution
    assert gradients is not None
    own = gradients.new_empty(everyones.shape[1:])
    reduce_scatter(own, gradients.flatten(0, 1), group=group)
    return own[: len(key)]


def gather(key: Tensor, key_rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """[ranks, most rows of a rank, d]; rows beyond a rank's own are 0."""
    most = max(key_rows)
    if len(key) < most:
        key = torch.cat([key, key.new_zeros(most - len(key), key.shape[1])])
    everyones = key.new_empty(group.size() * most, key.shape[1])
    all_gather(everyones, key.contiguous(), group=group)
    return everyones.unflatten(0, (group.size(), most))
