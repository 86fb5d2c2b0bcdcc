"""open_clip's ClipLoss and SigLipLoss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedkernels import distributed
from fedkernels.clip_loss import clip_loss
from fedkernels.compat.only_default import only_default
from fedkernels.internal.contrastive import scalar
from fedkernels.sigmoid_loss import sigmoid_loss

__all__ = ["ClipLoss", "SigLipLoss"]


class ClipLoss(nn.Module):
    """open_clip's ``ClipLoss``: the same arguments, values and gradients, without the logits in memory.

    Differences:

    - ``rank`` and ``world_size`` have to be those of torch.distributed's default group, and Horovod is not supported.
    - ``method="ring"`` keeps the memory of a rank at O(B d), see ``fedkernels.distributed``.
    - ``cache_labels`` changes nothing: no labels are formed.

    As in open_clip, the gradients of ``gather_with_grad=False`` are not those of the whole batch. With
    ``local_loss=True`` other ranks' losses do not reach a rank's features; with ``local_loss=False`` the features'
    gradients, averaged over the ranks as DistributedDataParallel does, are 1 / world_size of the right ones, while that
    of ``logit_scale`` is right.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__()
        only_default("open_clip.ClipLoss", use_horovod=(use_horovod, False))
        self.local_loss = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod
        self.method = method

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Computes the loss of [B, d] images and texts; a bias of all logits cancels out and gets the gradient 0."""
        if self.world_size == 1:
            loss = clip_loss(image_features, text_features, logit_scale)
        else:
            loss = self._of_all_ranks(image_features, text_features, logit_scale)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _of_all_ranks(self, image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
        _check_ranks(self.rank, self.world_size)
        if self.local_loss and not self.gather_with_grad:
            temperature = 1 / scalar(scale, image)  # in float64, as half precision would round it
            of_images = distributed.info_nce(image, text.detach(), temperature, method=self.method)
            return (of_images + distributed.info_nce(text, image.detach(), temperature, method=self.method)) / 2
        if self.local_loss:
            return distributed.clip_loss(image, text, scale, method=self.method)
        if isinstance(scale, Tensor):
            scale = _AverageGradient.apply(scale)
        if not self.gather_with_grad:
            image, text = (_DividedGradient.apply(part, self.world_size) for part in (image, text))
        return _AverageValue.apply(distributed.clip_loss(image, text, scale, method=self.method))


class SigLipLoss(nn.Module):
    """open_clip's ``SigLipLoss``: the same arguments, values and gradients, without the logits in memory.

    ``dist_impl`` is how the texts of the other ranks arrive: "gather" and "reduce" hold those of all ranks at once;
    "bidir", which None means, and "shift" pass them from rank to rank, so that a rank holds O(B d). All four compute
    the same. ``rank`` and ``world_size`` have to be those of torch.distributed's default group. ``cache_labels``
    changes nothing: no labels are formed.
    """

    def __init__(
        self, cache_labels: bool = False, rank: int = 0, world_size: int = 1, dist_impl: str | None = None
    ) -> None:
        super().__init__()
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl or "bidir"
        if self.dist_impl not in _METHODS:
            raise ValueError(f"dist_impl must be None or one of {', '.join(_METHODS)}, got {dist_impl!r}")

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Computes the loss of [B, d] images against the texts of all ranks; a logit_bias of None is 0."""
        given = image_features, text_features, logit_scale, 0.0 if logit_bias is None else logit_bias
        if self.world_size == 1:
            loss = sigmoid_loss(*given)
        else:
            _check_ranks(self.rank, self.world_size)
            loss = distributed.sigmoid_loss(*given, method=_METHODS[self.dist_impl])
        return {"contrastive_loss": loss} if output_dict else loss


_METHODS: dict[str, distributed.Method] = {"bidir": "ring", "shift": "ring", "reduce": "gather", "gather": "gather"}


def _check_ranks(rank: int, world_size: int) -> None:
    initialized = dist.is_available() and dist.is_initialized()
    if not initialized or (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank and world_size must be those of torch.distributed's default group, got {rank} and {world_size}"
        )


def _average(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class _AverageValue(torch.autograd.Function):
    """The mean over the ranks; the gradient passes unchanged to each rank's term."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _average(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _AverageGradient(torch.autograd.Function):
    """The value unchanged; the gradient is the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _average(grad)


class _DividedGradient(torch.autograd.Function):
    """The value unchanged; the gradient is divided by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None
