"""The losses as modules, for code that composes modules."""

from torch import Tensor, nn

from fedkernels.info_nce import info_nce
from fedkernels.linear_cka import linear_cka
from fedkernels.nt_xent import nt_xent


class InfoNCE(nn.Module):
    """``fedkernels.info_nce(query, key, temperature, reduction)``."""

    def __init__(self, temperature: float, reduction: str = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return info_nce(query, key, self.temperature, self.reduction)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, reduction={self.reduction!r}"


class NTXent(nn.Module):
    """``fedkernels.nt_xent(view1, view2, temperature, reduction)``."""

    def __init__(self, temperature: float, reduction: str = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction = reduction

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return nt_xent(view1, view2, self.temperature, self.reduction)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, reduction={self.reduction!r}"


class CKALoss(nn.Module):
    """``1 - fedkernels.linear_cka(x, y, centered)``, the mean over leading dimensions: 0 where x and y are alike."""

    def __init__(self, centered: bool = False) -> None:
        super().__init__()
        self.centered = centered

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 - linear_cka(x, y, self.centered).mean()

    def extra_repr(self) -> str:
        return f"centered={self.centered}"
