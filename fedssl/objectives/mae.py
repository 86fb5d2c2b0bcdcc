"""MAE: reconstruct the pixels of masked patches from the visible ones, which alone pass through the encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..augmentations.base import Augmentation
from ..augmentations.random_views import RandomViews
from ..errors import UserError
from ..models.model import Layer, Model
from ..models.stages import uncut_network
from .base import Objective, Step


def sine_cosine_positions(rows: int, columns: int, features: int) -> Tensor:
    """Return fixed positions of a grid's patches, row by row, [rows * columns, features].

    One half of the features tells the row and the other half the column, each by sines and cosines of `features` / 4
    wavelengths (Vaswani et al. 2017, section 3.5). `features` must be a multiple of 4.
    """
    frequencies = 10000.0 ** (-torch.arange(0, features, 4) / features)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = torch.stack([row, column], dim=-1).flatten(0, 1)[..., None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)


def patches_of(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut images [n, C, H, W] into patches of `size` (height, width), row by row: [n, patches, pixels]."""
    return F.unfold(images, size, stride=size).transpose(1, 2)


def take(tokens: Tensor, patches: Tensor) -> Tensor:
    """Return for each image the tokens [n, k, d] of `patches`, int64 [n, k]; tokens are [n, all patches, d]."""
    return tokens.gather(1, patches[..., None].expand(-1, -1, tokens.shape[2]))


def reconstruction_loss(predicted: Tensor, pixels: Tensor, normalize: bool) -> Tensor:
    """Return the mean squared error over masked patches, a scalar; both are [n, masked, pixels].

    With `normalize` each patch's pixels are first normalised by their own mean and variance, the latter divided by
    pixels - 1 and with 0.000001 added to it.
    """
    if normalize:
        variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
        pixels = (pixels - mean) / torch.sqrt(variance + 1e-6)
    return F.mse_loss(predicted, pixels)


@contextmanager
def visible_patches(network: Any, visible: Tensor) -> Iterator[list[Tensor]]:
    """Let a vision transformer of timm's see only some patches, int64 [n, k], in the body.

    Yields a list to which each forward pass adds its last tokens, [n, prefix + k, d].
    """
    prefix, tokens = network.num_prefix_tokens, list[Tensor]()

    def leave_out(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :prefix], take(output[:, prefix:], visible)], dim=1)

    handles = [
        network.patch_drop.register_forward_hook(leave_out),
        network.norm.register_forward_hook(lambda module, inputs, output: tokens.append(output)),
    ]
    try:
        yield tokens
    finally:
        for handle in handles:
            handle.remove()


class Decoder(nn.Module):
    """A small transformer from the encoder's tokens to the pixels of masked patches; used during training only."""

    positions: Tensor

    def __init__(self, encoder: Any, features: int, layers: int, heads: int):
        from timm.models.vision_transformer import Block  # here, as importing timm takes seconds

        super().__init__()
        patches = encoder.patch_embed
        rows, columns = patches.grid_size
        self.prefix = encoder.num_prefix_tokens
        self.embed = nn.Linear(encoder.embed_dim, features)
        self.mask_token = nn.Parameter(torch.randn(features) * 0.02)
        self.register_buffer("positions", sine_cosine_positions(rows, columns, features), persistent=False)
        self.blocks = nn.Sequential(*(Block(features, heads, qkv_bias=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(features)
        self.pixels = nn.Linear(features, patches.proj.in_channels * patches.patch_size[0] * patches.patch_size[1])
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        """Return the pixels [n, masked, pixels] of masked patches, given tokens [n, prefix + visible, d]."""
        embedded = self.embed(tokens)
        seen, hidden = embedded[:, self.prefix :], self.mask_token.to(embedded).expand(*masked.shape, -1)
        positions = self.positions.expand(len(tokens), -1, -1)
        patches = torch.cat([seen + take(positions, visible), hidden + take(positions, masked)], dim=1)
        decoded = self.blocks(torch.cat([embedded[:, : self.prefix], patches], dim=1))
        return self.pixels(self.norm(decoded[:, -masked.shape[1] :]))


class MaskedAutoencoder(Model):
    """An encoder and a decoder, which takes tokens and not what the encoder returns."""

    def represent(self, images: Tensor, layer: Layer = "predictor") -> Tensor:
        """Return the encoder's output for whole images, at either layer."""
        return self.encoder(images)


class MAE(Objective):
    """He et al. 2022, Masked Autoencoders Are Scalable Vision Learners, section 3, for vision transformers of timm's.

        `reconstruction_loss`(decoder's pixels of the masked patches, the image's own)

    A random share of the patches is masked. The others pass through the encoder, and its tokens, with one learned
    vector for each masked patch, through the decoder. Both networks travel. Masks come from torch's global generator,
    which is seeded for each client and round. `Step.representations` are those of the visible patches.

    Defaults are the paper's: the decoder of section 4, and pixels normalised by patch, which the released code has as
    an option. As in the paper images are only cropped and mirrored, with the recipe's options for that. An augmentation
    of one's own is used as it is. The encoder keeps its own initialisation and its learned positions; the paper's are
    fixed sines and cosines, as the decoder's are here.
    """

    masked_share: float = Field(0.75, gt=0, lt=1, description="share of the patches that are masked")
    decoder_features: int = Field(512, ge=4, multiple_of=4, description="width of the decoder")
    decoder_layers: int = Field(8, ge=1, description="transformer blocks of the decoder")
    decoder_heads: int = Field(16, ge=1, description="attention heads of the decoder; must divide its width")
    normalize_pixels: bool = Field(
        True, description="whether a patch's pixels are normalised by their mean and variance before they are predicted"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> MAE:
        if self.decoder_features % self.decoder_heads:
            raise ValueError(f"decoder_heads {self.decoder_heads} must divide decoder_features {self.decoder_features}")
        return self

    @property
    def views(self) -> int:
        return 1

    def training_augmentation(self, augmentation: Augmentation) -> Augmentation:
        if type(augmentation) is not RandomViews:
            return augmentation
        colours = ("jitter_probability", "grayscale", "blur", "solarize")
        return RandomViews(**augmentation.model_dump() | dict.fromkeys(colours, 0.0))

    def build(self, encoder: nn.Module, classes: int) -> Model:
        from timm.models.vision_transformer import VisionTransformer  # here, as importing timm takes seconds

        network = uncut_network(encoder)
        if not isinstance(network, VisionTransformer):
            raise UserError(
                f"objective mae masks patches, so it needs a vision transformer such as small_vit or "
                f"vit_tiny_patch16_224, got {type(network).__name__}: change architectures"
            )
        patches = network.patch_embed.num_patches
        if not 0 < self._visible(patches) < patches:
            raise UserError(
                f"objective.masked_share {self.masked_share} leaves {self._visible(patches)} of {patches} patches "
                "visible; some must be visible and some masked: change it, or take smaller patches"
            )
        decoder = Decoder(network, self.decoder_features, self.decoder_layers, self.decoder_heads)
        return MaskedAutoencoder({"encoder": encoder, "decoder": decoder})

    def _visible(self, patches: int) -> int:
        return patches - round(patches * self.masked_share)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        network: Any = uncut_network(model.encoder)
        pixels = patches_of(views[0], network.patch_embed.patch_size)
        order = torch.rand(pixels.shape[:2]).argsort(dim=1).to(pixels.device, non_blocking=True)
        visible, masked = order.tensor_split([self._visible(order.shape[1])], dim=1)
        with visible_patches(network, visible) as tokens:
            representation = model.encoder(views[0])
        predicted = model.online["decoder"](tokens[0], visible, masked)
        loss = reconstruction_loss(predicted, take(pixels, masked), self.normalize_pixels)
        return Step(loss, (representation,))
