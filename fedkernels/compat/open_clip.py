"""open_clip's ClipLoss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedkernels import distributed
from fedkernels.clip_loss import clip_loss
from fedkernels.compat.only_default import only_default

__all__ = ["ClipLoss"]


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
        self.rank = rank
        self.world_size = world_size
        self.method = method

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of [B, d] images and texts; a bias of all logits cancels out and gets the gradient 0."""
        if self.world_size == 1:
            loss = clip_loss(image_features, text_features, logit_scale)
        else:
            loss = self._of_all_ranks(image_features, text_features, logit_scale)
        if logit_bias is not None:
            loss = loss + 0 * logit_bias.sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _of_all_ranks(self, image: Tensor, text: Tensor, scale: Tensor | float) -> Tensor:
        if not dist.is_initialized() or (self.rank, self.world_size) != (dist.get_rank(), dist.get_world_size()):
            raise ValueError(
                f"rank and world_size must be those of torch.distributed's default group, got {self.rank} and "
                f"{self.world_size}"
            )
        if self.local_loss and not self.gather_with_grad:
            of_images = distributed.info_nce(image, text.detach(), 1 / scale, method=self.method)
            return (of_images + distributed.info_nce(text, image.detach(), 1 / scale, method=self.method)) / 2
        if self.local_loss:
            return distributed.clip_loss(image, text, scale, method=self.method)
        if isinstance(scale, Tensor):
            scale = _AverageGradient.apply(scale)
        if not self.gather_with_grad:
            image, text = (_DividedGradient.apply(part, self.world_size) for part in (image, text))
        return _AverageValue.apply(distributed.clip_loss(image, text, scale, method=self.method))


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
