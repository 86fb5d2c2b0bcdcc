"""The share of a client's batches that this process trains on, and what it exchanges with the other processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .batch_norm import StatisticsOfWholeBatch


@dataclass(frozen=True)
class Share:
    """An equal share of every batch; the whole batch where one process trains alone.

    Attributes:
        rank: this process's number, from 0.
        processes: how many processes train together.
    """

    rank: int = 0
    processes: int = 1

    @property
    def whole(self) -> bool:
        return self.processes == 1

    def rows(self, batch: Tensor) -> Tensor:
        """This process's rows of a batch's, int64 [n / processes] of [n]; `processes` must divide n."""
        return batch if self.whole else batch.reshape(self.processes, -1)[self.rank]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the processes, which must all pass the same shapes in the same order.

        The processes get bit-identical means. There is one all-reduce for each dtype.
        """
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in same])
            dist.all_reduce(flat)
            means = (flat / self.processes).split([tensor.numel() for tensor in same])
            torch._foreach_copy_(same, [mean.view_as(tensor) for mean, tensor in zip(means, same, strict=True)])

    def batch_statistics(self) -> AbstractContextManager[object]:
        """Within it, BatchNorm in training mode normalises over the whole batch."""
        return nullcontext() if self.whole else StatisticsOfWholeBatch()


_share = Share()


def own_share() -> Share:
    """This process's share: whole batches, unless it has joined others."""
    return _share


def join(share: Share, meeting_point: Path, device_type: str) -> None:
    """Make this process one of several that train together: NCCL on CUDA, gloo on the CPU.

    On CUDA it sees only the GPU of its rank from now on, so CUDA must not have been used in this process. An exchange
    ends with an error if another process does not take part within torch's default time: half an hour for gloo, ten
    minutes for NCCL.

    Args:
        share: this process's.
        meeting_point: a file that does not exist yet, the same one for all processes.
        device_type: `cpu` or `cuda`.
    """
    global _share
    if device_type == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(share.rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
    # All processes are on this machine: nobody else shall reach gloo's sockets.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=meeting_point.as_uri(),
        rank=share.rank,
        world_size=share.processes,
    )
    _share = share


def visible_device(rank: int, visible: str | None) -> str:
    """The name of a rank's GPU among those that CUDA_VISIBLE_DEVICES holds; without it, all GPUs by their numbers."""
    return str(rank) if visible is None else visible.split(",")[rank].strip()
