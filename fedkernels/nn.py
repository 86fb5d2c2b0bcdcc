"""The losses as modules, for code that composes modules.

A module takes the options of its function, under the same names and in the same order: what belongs to the loss when it
is made, and what changes with the batch when it is called.
"""

from torch import Tensor, nn

from fedkernels.clip_loss import clip_loss
from fedkernels.info_nce import info_nce
from fedkernels.internal import checks
from fedkernels.linear_cka import linear_cka
from fedkernels.nt_xent import nt_xent
from fedkernels.sigmoid_loss import sigmoid_loss
from fedkernels.supervised_contrastive_loss import supervised_contrastive_loss

__all__ = ["CKALoss", "CLIPLoss", "InfoNCE", "NTXent", "SigmoidLoss", "SupervisedContrastiveLoss"]


class _Reduced(nn.Module):
    """A loss with a term for each row."""

    def __init__(self, reduction: checks.Reduction = "mean") -> None:
        super().__init__()
        checks.one_of("reduction", reduction, checks.REDUCTIONS)
        self.reduction = reduction

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class _Tempered(_Reduced):
    """A loss with a temperature."""

    def __init__(self, temperature: float | Tensor, reduction: checks.Reduction = "mean") -> None:
        super().__init__(reduction)
        is_tensor = isinstance(temperature, Tensor)  # whose entry the function checks, as it may be learned
        self.temperature = temperature if is_tensor else checks.positive("temperature", temperature)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, {super().extra_repr()}"


class InfoNCE(_Tempered):
    """``fedkernels.info_nce(query, key, temperature, reduction, **options)``; a Parameter as temperature is learned."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        positives: int | Tensor = 0,
        negatives: Tensor | None = None,
        labels: tuple[Tensor, Tensor] | None = None,
        excluded: Tensor | None = None,
        recompute: bool = False,
    ) -> Tensor:
        options = {"positives": positives, "negatives": negatives, "labels": labels, "excluded": excluded}
        return info_nce(query, key, self.temperature, self.reduction, recompute=recompute, **options)  # type: ignore[arg-type]


class NTXent(_Tempered):
    """``fedkernels.nt_xent(view1, view2, temperature, reduction)``; a Parameter as temperature is learned."""

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return nt_xent(view1, view2, self.temperature, self.reduction)


class SupervisedContrastiveLoss(_Tempered):
    """``fedkernels.supervised_contrastive_loss(features, labels, temperature, reduction)``.

    A Parameter as temperature is learned.
    """

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return supervised_contrastive_loss(features, labels, self.temperature, self.reduction)


class CLIPLoss(_Reduced):
    """``fedkernels.clip_loss(image, text, logit_scale, reduction)``; the model has the scale, as in CLIP."""

    def forward(self, image: Tensor, text: Tensor, logit_scale: float | Tensor) -> Tensor:
        return clip_loss(image, text, logit_scale, self.reduction)


class SigmoidLoss(_Reduced):
    """``fedkernels.sigmoid_loss(image, text, logit_scale, logit_bias, reduction)``.

    The model has scale and bias, as in SigLIP.
    """

    def forward(self, image: Tensor, text: Tensor, logit_scale: float | Tensor, logit_bias: float | Tensor) -> Tensor:
        return sigmoid_loss(image, text, logit_scale, logit_bias, self.reduction)


class CKALoss(nn.Module):
    """``1 - fedkernels.linear_cka(x, y, centered)``, the mean over leading dimensions: 0 where x and y are alike."""

    def __init__(self, centered: bool = False) -> None:
        super().__init__()
        self.centered = checks.boolean("centered", centered)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 - linear_cka(x, y, self.centered).mean()

    def extra_repr(self) -> str:
        return f"centered={self.centered}"
