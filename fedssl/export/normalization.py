"""How pixels become what an encoder takes, for programs without fedssl."""

from __future__ import annotations

from torch import Tensor, nn

#: of pixels between 0 and 1, in every channel; the same as `data.pixels.normalize` on uint8
MEAN, STD = 0.5, 0.25


class WithNormalization(nn.Module):
    """An encoder that takes pixels between 0 and 1, float32 [n, C, H, W], and normalises them itself."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.encoder((pixels - MEAN) / STD)
        return out
