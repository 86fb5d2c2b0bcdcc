"""One client's training divided among several processes, each with a share of every batch (`training.processes`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

import fedkernels


class StatisticsOfWholeBatch(TorchFunctionMode):
    """Takes the statistics of `torch.nn.functional.batch_norm` in training mode over all processes, in its body.

    The processes must have shares of equal size, and run the same layers in the same order, forward and backward.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        function = batch_norm if func is F.batch_norm else func
        return function(*args, **(kwargs or {}))


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise a batch like `torch.nn.functional.batch_norm`, given each process's equal share of it, [n, C, ...].

    The gradients are those of the sum of all processes' losses, as in `fedkernels.distributed`: averaged over the
    processes, the parameters' gradients are those of one process with the whole batch. Statistics have at least
    float32. Nothing is exchanged where `training` is False.
    """
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    with torch.no_grad():
        mean, var = _statistics(x)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1] * dist.get_world_size()
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_var.lerp_((var * (count / (count - 1))).to(running_var), momentum)
        inverse_deviation = (var + eps).rsqrt()
    out: Tensor = _Normalize.apply(x, weight, bias, mean, inverse_deviation)
    return out


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel over the whole batch, [C] each."""
    var, mean = torch.var_mean(_wide(x), _all_but_channels(x), correction=0)
    own = torch.stack([mean, var])
    shares = own.new_empty(dist.get_world_size(), *own.shape)
    # Newer torch has another name for it, and warns of this one.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(shares.flatten(0, 1), own)
    means, variances = shares.unbind(dim=1)
    mean = means.mean(dim=0)
    return mean, (variances + (means - mean).square()).mean(dim=0)


class _Normalize(torch.autograd.Function):
    """(x - mean) * inverse_deviation * weight + bias; the backward pass knows that mean and variance follow from x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse_deviation: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse_deviation)
        ctx.has_bias = bias is not None
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        out = (_wide(x) - _by_channel(mean, x)) * _by_channel(scale, x)
        return (out if bias is None else out + _by_channel(bias, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation = ctx.saved_tensors
        grad = _wide(grad)
        normalized = (_wide(x) - _by_channel(mean, x)) * _by_channel(inverse_deviation, x)
        sums = torch.stack([grad.sum(_all_but_channels(x)), (grad * normalized).sum(_all_but_channels(x))])
        bias_gradient, weight_gradient = sums.clone()  # of this share
        dist.all_reduce(sums)
        mean_term, deviation_term = sums / (x.numel() // x.shape[1] * dist.get_world_size())
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        centred = grad - _by_channel(mean_term, x) - normalized * _by_channel(deviation_term, x)
        x_gradient = (centred * _by_channel(scale, x)).to(x.dtype)
        weight_gradient = None if weight is None else weight_gradient
        return x_gradient, weight_gradient, bias_gradient if ctx.has_bias else None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape [C] so that it broadcasts with x, [n, C, ...]."""
    return values.view(-1, *[1] * (x.dim() - 2))


@dataclass(frozen=True)
class Share:
    """Equal share of every batch, that of process `rank` (from 0); the whole batch where one process trains alone."""

    rank: int = 0
    processes: int = 1

    @property
    def whole(self) -> bool:
        return self.processes == 1

    def rows(self, batch: Tensor) -> Tensor:
        """Return this process's rows, int64 [n / processes] of [n]; `processes` must divide n."""
        return batch if self.whole else batch.reshape(self.processes, -1)[self.rank]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean, bit-identical in all processes; all must pass the same shapes in order."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in same])
            dist.all_reduce(flat)
            means = (flat / self.processes).split([tensor.numel() for tensor in same])
            torch._foreach_copy_(same, [mean.view_as(tensor) for mean, tensor in zip(means, same, strict=True)])

    def batch_statistics(self) -> AbstractContextManager[object]:
        """Return a context in which BatchNorm in training mode normalises over the whole batch."""
        return nullcontext() if self.whole else StatisticsOfWholeBatch()


_share = Share()


def own_share() -> Share:
    """Return this process's share: whole batches, unless it has joined others."""
    return _share


def join(share: Share, meeting_point: Path, device_type: str) -> None:
    """Make this process one of several that train together: NCCL on CUDA, gloo on the CPU.

    On CUDA it sees only the GPU of its rank from now on, so CUDA must not have been used in this process. An exchange
    ends with an error if another process does not take part within torch's default time: half an hour for gloo, ten
    minutes for NCCL. The meeting point is a file that does not exist yet, the same one for all processes.
    """
    global _share
    if device_type == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(share.rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
    # All processes are on this machine: nobody else shall reach gloo's sockets.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=meeting_point.as_uri(), rank=share.rank, world_size=share.processes)
    _share = share


def visible_device(rank: int, visible: str | None) -> str:
    """Return the name of a rank's GPU among those in CUDA_VISIBLE_DEVICES, or the rank if that is not set."""
    return str(rank) if visible is None else visible.split(",")[rank].strip()


def losses(shared: bool) -> ModuleType:
    """Return the module whose `info_nce` and `nt_xent` see the whole batch, also where processes share it.

    With `fedkernels.distributed` the mean of the losses over the processes is the loss of the whole batch.
    """
    return import_module("fedkernels.distributed") if shared else fedkernels  # some builds lack torch.distributed
