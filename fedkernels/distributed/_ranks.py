"""The process group, and what its ranks tell each other before keys travel."""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

Method = Literal["gather", "ring"]
METHODS = get_args(Method)
_LOSSES = {
    "info_nce": "info_nce or clip_loss",
    **{name: name for name in ("nt_xent", "sigmoid_loss", "supervised_contrastive_loss")},
}
# Newer torch has other names for both, and warns of these. One that was built without distributed has none.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """The name by which an operator finds the group; the default group for None.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process does not belong to the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed must be initialised before a distributed loss is computed: call "
            "torch.distributed.init_process_group, or use the loss of the same name in fedkernels for a single process"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("group must be a process group that this process belongs to")
    return str(group.group_name)


def named_group(name: str) -> dist.ProcessGroup:
    """The process group whose ``group_name`` is `name`."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]  # a NewType of str that older versions do not have


class Call(NamedTuple):
    """What a rank passes to a distributed loss. Only the numbers of rows and `key_gradient` may differ."""

    query_rows: int
    key_rows: int
    columns: int
    key_dtype: int  # index in _DTYPES, as the next
    compute_dtype: int
    loss: int  # index in _LOSSES
    method: int  # index in METHODS
    gradient: int  # is any gradient needed, that is, is there a backward pass?
    key_gradient: int


def describe(
    query: Tensor, key: Tensor, dtype: torch.dtype, loss: str, method: str, gradient: bool, key_gradient: bool
) -> Call:
    """This rank's call."""
    return Call(
        *(len(query), len(key), query.shape[1], _DTYPES.index(key.dtype), _DTYPES.index(dtype)),
        *(list(_LOSSES).index(loss), METHODS.index(method), int(gradient), int(key_gradient)),
    )


def exchange(call: Call, device: torch.device, group: dist.ProcessGroup) -> list[Call]:
    """The calls of all ranks.

    Raises:
        ValueError: on all ranks, if the calls do not fit together.
    """
    own = torch.tensor([call], dtype=torch.int64).to(device)
    everyones = own.new_empty(group.size(), own.shape[1])
    all_gather(everyones, own, group=group)
    calls = [Call(*numbers) for numbers in everyones.tolist()]
    query_rows = [call.query_rows for call in calls]
    key_rows = [call.key_rows for call in calls]
    if min(query_rows) == 0:
        raise ValueError(f"each rank must have at least one row, got {query_rows} rows on ranks 0 to {len(calls) - 1}")
    if any(keys < queries for keys, queries in zip(key_rows, query_rows, strict=True)):
        raise ValueError(f"each rank must have at least as many keys as queries, got {key_rows} and {query_rows}")
    dtypes = [str(dtype) for dtype in _DTYPES]
    losses = list(_LOSSES.values())
    same("the number of columns d", [str(call.columns) for call in calls])
    same("the dtype of the keys", [dtypes[call.key_dtype] for call in calls])
    same("the dtype of the sums (float64 if an input is float64)", [dtypes[call.compute_dtype] for call in calls])
    same("the loss", [losses[call.loss] for call in calls])
    same("method", [METHODS[call.method] for call in calls])
    same("whether an input requires a gradient", ["yes" if call.gradient else "no" for call in calls])
    return calls


def same(what: str, of_ranks: list[str]) -> None:
    """Raises ValueError unless all ranks say the same."""
    if len(set(of_ranks)) > 1:
        raise ValueError(f"{what} must be the same on all ranks, got {', '.join(of_ranks)} on ranks 0, 1, ...")
