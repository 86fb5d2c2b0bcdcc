"""The losses as modules, for code that composes modules."""

from torch import Tensor, nn

from fedkernels.clip_loss import clip_loss
from fedkernels.info_nce import info_nce
from fedkernels.linear_cka import linear_cka
from fedkernels.nt_xent import nt_xent
from fedkernels.sigmoid_loss import sigmoid_loss
from fedkernels.supervised_contrastive_loss import supervised_contrastive_loss


class InfoNCE(nn.Module):
    """``fedkernels.info_nce(query, key, temperature, reduction, **options)``; a Parameter as temperature is learned."""

    def __init__(self, temperature: float | Tensor, reduction: str = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction = reduction

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

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, reduction={self.reduction!r}"


class NTXent(nn.Module):
    """``fedkernels.nt_xent(view1, view2, temperature, reduction)``; a Parameter as temperature is learned."""

    def __init__(self, temperature: float | Tensor, reduction: str = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return nt_xent(view1, view2, self.temperature, self.reduction)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, reduction={self.reduction!r}"


class SupervisedContrastiveLoss(nn.Module):
    """``fedkernels.supervised_contrastive_loss(features, labels, temperature, reduction)``.

    A Parameter as temperature is learned.
    """

    def __init__(self, temperature: float | Tensor, reduction: str = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return supervised_contrastive_loss(features, labels, self.temperature, self.reduction)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, reduction={self.reduction!r}"


class CLIPLoss(nn.Module):
    """``fedkernels.clip_loss(image, text, logit_scale)``; the model has the scale, as in CLIP."""

    def forward(self, image: Tensor, text: Tensor, logit_scale: float | Tensor) -> Tensor:
        return clip_loss(image, text, logit_scale)


class SigmoidLoss(nn.Module):
    """``fedkernels.sigmoid_loss(image, text, logit_scale, logit_bias)``; the model has scale and bias, as in SigLIP."""

    def forward(self, image: Tensor, text: Tensor, logit_scale: float | Tensor, logit_bias: float | Tensor) -> Tensor:
        return sigmoid_loss(image, text, logit_scale, logit_bias)


class CKALoss(nn.Module):
    """``1 - fedkernels.linear_cka(x, y, centered)``, the mean over leading dimensions: 0 where x and y are alike."""

    def __init__(self, centered: bool = False) -> None:
        super().__init__()
        self.centered = centered

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 - linear_cka(x, y, self.centered).mean()

    def extra_repr(self) -> str:
        return f"centered={self.centered}"
