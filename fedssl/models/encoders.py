"""Encoders: the networks whose output, the representation, federated self-supervised learning trains.

They are small ones defined here, sized for a few CPU cores, or any of `timm`, adapted to small images.

| name | parameters | multiply-adds, 8x8x1 | multiply-adds, 32x32x3 | features |
|---|---|---|---|---|
| `small_convnet` | 240,608 | 1.0 M | 3.2 M | 128 |
| `small_convnet_512` | 683,744 | 2.7 M | 4.9 M | 512 |
| `small_convnet_wide` | 540,624 | 2.2 M | 7.0 M | 192 |
| `small_resnet10` | 307,248 | 1.0 M | 16.2 M | 128 |
| `small_resnet10_wide` | 690,120 | 2.2 M | 36.1 M | 192 |
| `small_vit` | 201,536 | 3.5 M | 3.7 M | 64 |
| `small_vit_8x8` | 204,416 | 14.9 M | 15.1 M | 64 |
| `small_resnet18` | 699,888 | 2.2 M | 35.0 M | 128 |

Parameters are for grey 8x8 images. Colour images add 288 to 864, and 32x32x3 images add 12,032 to `small_vit`, which
cuts every image into 4x4 patches, and 3,008 to `small_vit_8x8`, which cuts it into 8x8. Multiply-adds are those of one
image's forward pass; a training step takes about three times as many. For comparison, timm's `resnet18` takes 555 M at
32x32x3.
"""

import difflib
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError, explained

# Up to this image side the ImageNet stem (7x7 stride 2, then a stride-2 max-pool) would discard most of the
# picture before the first block: on small images that costs about 10 points of accuracy.
SMALL_IMAGE = 64
# name -> (widths of the four blocks)
_CONVNETS = {
    "small_convnet": (32, 64, 128, 128),
    "small_convnet_wide": (48, 96, 192, 192),
    "small_convnet_512": (32, 64, 128, 512),
}
# name -> (residual blocks per stage, widths of the four stages)
_RESNETS = {
    "small_resnet10": ((1, 1, 1, 1), (16, 32, 64, 128)),
    "small_resnet10_wide": ((1, 1, 1, 1), (24, 48, 96, 192)),
    "small_resnet18": ((2, 2, 2, 2), (16, 32, 64, 128)),
}
# name -> (patches along the image's side, whose own side follows from the image's; width, blocks, heads)
_SMALL_VISION_TRANSFORMERS = {"small_vit": (4, 64, 4, 4), "small_vit_8x8": (8, 64, 4, 4)}
# timm's vit_tiny_patch16_224 with patches of another side, at any image size: LW-FedSSL's section 4.8 and Table 11
_TINY_PATCHES = {"vit_tiny_patch4": 4, "vit_tiny_patch8": 8}
# timm's files whose models take `img_size` and `patch_size` and cut the image into a grid of patches.
_VISION_TRANSFORMERS = ("vision_transformer", "deit", "eva", "beit")
#: the first layers of timm's ResNets, see `build_encoder`
Stem = Literal["auto", "small", "large"]
#: what an exported encoder says of its stem
STEMS: dict[Stem, str] = {"small": "3x3 stride 1 without max-pool", "large": "the architecture's own"}
_ADVICE = "choose another, for example small_resnet18 or resnet18"


class Encoder(nn.Module):
    """The interface of an encoder: maps normalised images, float [n, C, H, W], to float [n, num_features]."""

    num_features: int


class _WideConv(nn.Conv2d):
    """A convolution of small images into many channels; on a processor it trains as one product of unfolded patches.

    oneDNN's gradients take twice as long there: 64 images of 4x4 pixels from 128 to 512 channels, AVX2.
    """

    def forward(self, images: Tensor) -> Tensor:
        if not self.training or images.device.type != "cpu":
            return super().forward(images)
        side = -(-images.shape[-1] // self.stride[0])
        patches = F.unfold(images, self.kernel_size, padding=1, stride=self.stride).transpose(1, 2)
        values = patches.reshape(-1, patches.shape[2]) @ self.weight.flatten(1).T
        return values.view(len(images), -1, side, self.out_channels).permute(0, 3, 1, 2)


class SmallConvNet(Encoder):
    """Four blocks of 3x3 convolution, BatchNorm and ReLU, then the average over the spatial positions.

    A block has stride 2 as long as the side of its input is above 2: an 8x8 image goes through 4, 2, 2, 2.
    """

    def __init__(self, in_channels: int, image_size: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels, side = in_channels, image_size
        for width in widths:
            stride = 2 if side > 2 else 1
            conv = _WideConv if width >= 512 and side <= 4 else nn.Conv2d
            blocks += [
                conv(channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            channels, side = width, -(-side // stride)
        self.blocks = nn.Sequential(*blocks)
        self.num_features = channels

    def forward_features(self, images: Tensor) -> Tensor:
        """Return what the average is taken of, [n, d, H', W'], by timm's name for it."""
        return self.blocks(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images).mean(dim=(2, 3))


class PatchFeatures(nn.Module):
    """An encoder's features before they are pooled: normalised images, float [n, C, H, W], to float [n, H', W', d].

    Of a transformer they are the patches' last tokens, without the class token and others that belong to no patch; of a
    convolutional network its last feature map. d is `num_features`, unless there is a layer after the pooling.
    """

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder: Any = encoder

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.encoder.forward_features(images)
        if features.dim() == 3:
            grid = self.encoder.patch_embed.grid_size
            return features[:, self.encoder.num_prefix_tokens :].unflatten(1, grid)
        return features if getattr(self.encoder, "output_fmt", "NCHW") == "NHWC" else features.permute(0, 2, 3, 1)


def encoder_names() -> list[str]:
    """Return the sorted names of the small encoders defined here. `timm.list_models()` lists timm's."""
    return sorted([*_CONVNETS, *_RESNETS, *_SMALL_VISION_TRANSFORMERS])


def build_encoder(
    architecture: str, in_channels: int, image_size: int, height: int | None = None, stem: Stem = "auto"
) -> Encoder:
    """Build an untrained encoder, initialised from torch's global random generator.

    Args:
        architecture: one of `encoder_names()`, or any name that `timm.create_model` knows (weights.py loads weights).
            Two families of timm are adapted to images of at most 64 pixels a side:
            ResNets (`timm.models.resnet.ResNet`, whatever their stem was) get one 3x3 stride-1 convolution as
            stem and no max-pool; vision transformers get a patch size that leaves about 8x8 tokens (8 at 64
            pixels, 4 at 28 to 32, 2 below). `vit_tiny_patch4` and `vit_tiny_patch8` are timm's
            `vit_tiny_patch16_224` with patches of 4 and 8 pixels at any image size.
        in_channels: 1 for grey, 3 for colour, or another number.
        image_size: side of the square images in pixels, or the width of others.
        height: of images that are not square.
        stem: of timm's ResNets: `auto` is the one above, `small` is one 3x3 convolution at any size, and `large` the
            architecture's own. `small_resnet` networks always have the 3x3 convolution.

    Returns:
        A module on the CPU, in training mode, with the members of `Encoder`; timm's are not instances of it.

    Raises:
        UserError: the name is unknown (with the closest known ones), or the model cannot take such images or would
            leave out some of their pixels.
    """
    if architecture in _CONVNETS:
        return SmallConvNet(in_channels, image_size, _CONVNETS[architecture])
    name, arguments = timm_arguments(architecture, in_channels, image_size)
    import timm  # here, as importing timm takes seconds
    from timm.models.resnet import ResNet

    # Each of timm's files raises its own exceptions for an image that does not fit, some only in the forward pass.
    # The forward pass also gives the true dimension of the output, which is not `num_features` in models with a
    # convolution after the pooling (MobileNetV3).
    height = height or image_size
    images = f"{height}x{image_size} pixels and {in_channels} channels"
    with explained(f"architecture: timm's {architecture!r} does not take {images}", f"; {_ADVICE}"):
        model = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
        small_images = max(height, image_size) <= SMALL_IMAGE
        small = architecture in _RESNETS or stem == "small" or (stem == "auto" and small_images)
        if isinstance(model, ResNet) and small:
            _use_small_image_stem(model, in_channels)
        output, left_out = probe(model, (in_channels, height, image_size))
    if not isinstance(output, Tensor) or output.dim() != 2:
        raise UserError(f"architecture: timm's {architecture!r} does not give one vector an image; {_ADVICE}")
    if left_out:
        whole = min(height, image_size) - (left_out if height == image_size else 0)
        raise UserError(
            f"image_size: {architecture!r} cuts images into whole patches and leaves out pixels: the last {left_out} "
            f"of {height}x{image_size}; set data.image_size={whole}, or {_ADVICE}"
        )
    encoder = cast(Encoder, model)
    encoder.num_features = output.shape[1]
    return encoder


def probe(network: nn.Module, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Return a network's output for two images of `shape`, [C, H, W], and how many last rows or columns it leaves out.

    NaN passes through every layer, also where a weight is zero, and so shows which pixels the output depends on. The
    network runs in evaluation mode, and then gets its own mode back.
    """
    images = torch.zeros(2, *shape, device=next(network.parameters()).device)
    with torch.no_grad(), ExitStack() as stack:
        stack.callback(network.train, network.training)
        network.eval()
        for left_out in range(min(shape[1:])):
            images[0, :, -1 - left_out] = images[1, :, :, -1 - left_out] = torch.nan
            output = network(images)
            if not isinstance(output, Tensor) or output.flatten(1).isnan().any(dim=1).all():
                return output, left_out
    return output, 0  # a network that hides every NaN shows nothing


def timm_arguments(architecture: str, in_channels: int, image_size: int) -> tuple[str, dict[str, Any]]:
    """Return name and arguments, as JSON's values, of `timm.create_model(name, num_classes=0, **arguments)`.

    That is the whole encoder, apart from the stem of ResNets for small images (`has_small_image_stem`). Every encoder
    except the small convolutional networks is one of timm's.

    Raises:
        UserError: the name is unknown (with the closest known ones), or a transformer cannot cut such images.
    """
    import timm
    from timm.models import is_model_in_modules

    if architecture in _RESNETS:
        layers, widths = _RESNETS[architecture]
        # timm fixes the plain stem's width at 64; that of the "deep" stem is free, and the stem is replaced.
        # timm starts each residual branch at zero. An untrained network then sees only the pixels that strided 1x1
        # shortcuts select, nine of an 8x8 image, and a client here trains for only a few hundred steps.
        stem = {"stem_type": "deep", "stem_width": widths[0] // 2, "zero_init_last": False}
        return "resnet18", {"in_chans": in_channels, "layers": list(layers), "channels": list(widths), **stem}
    if architecture in _SMALL_VISION_TRANSFORMERS:
        grid, width, blocks, heads = _SMALL_VISION_TRANSFORMERS[architecture]
        _require_multiple(architecture, image_size, grid)
        size = {"img_size": image_size, "patch_size": image_size // grid}
        shape = {"embed_dim": width, "depth": blocks, "num_heads": heads}
        return "vit_tiny_patch16_224", {"in_chans": in_channels, **size, **shape}
    if architecture in _TINY_PATCHES:
        patch = _TINY_PATCHES[architecture]
        _require_multiple(architecture, image_size, patch)
        return "vit_tiny_patch16_224", {"in_chans": in_channels, "img_size": image_size, "patch_size": patch}
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, [*encoder_names(), *_TINY_PATCHES, *timm.list_models()], n=5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"try one of {', '.join(encoder_names())}"
        raise UserError(f"architecture: unknown name {architecture!r}; {hint} (any name in timm works)")

    base_name = architecture.split(".")[0]  # without timm's tag of pretrained weights
    pretrained_config = timm.get_pretrained_cfg(base_name)
    arguments: dict[str, Any] = {"in_chans": in_channels}
    if pretrained_config is not None and pretrained_config.fixed_input_size:
        arguments["img_size"] = image_size
    if image_size <= SMALL_IMAGE and is_model_in_modules(base_name, _VISION_TRANSFORMERS):
        # with at least 7 patches along the image's side
        arguments["patch_size"] = next((patch for patch in (8, 4) if image_size // patch >= 7), 2)
    return architecture, arguments


def _require_multiple(architecture: str, image_size: int, step: int) -> None:
    if image_size % step:
        below = image_size - image_size % step
        sides = f"{below} or {below + step}" if below else str(step)
        raise UserError(
            f"image_size: {architecture} cuts images into equal patches, so a side must be a multiple of {step}, got "
            f"{image_size}: set data.image_size={sides}"
        )


def take_images_of_any_size(network: nn.Module) -> None:
    """Let a vision transformer of timm's interpolate its positions for images of other sizes; others stay as they are.

    At its own size it computes the same as before.
    """
    if hasattr(network, "dynamic_img_size"):
        from timm.layers.format import Format

        transformer: Any = network
        transformer.dynamic_img_size, patches = True, transformer.patch_embed
        patches.strict_img_size, patches.flatten, patches.output_fmt = False, False, Format.NHWC


def has_small_image_stem(network: nn.Module) -> bool:
    """Return whether an encoder is a ResNet of timm's with the stem for small images."""
    resnet = sys.modules.get("timm.models.resnet")  # importing timm takes seconds, which our own networks do not need
    return resnet is not None and isinstance(network, resnet.ResNet) and isinstance(network.maxpool, nn.Identity)


def stored_stem(exported: Mapping[str, Any]) -> Stem:
    """Return the stem of an exported encoder, given what its config.json says under `fedssl`."""
    return next((stem for stem, text in STEMS.items() if exported.get("stem") == text), "auto")


def stem_sentence(architecture: str, network: nn.Module) -> str | None:
    """Return what to tell of a ResNet whose stem for small images costs much time; None for other networks."""
    if architecture in _RESNETS or not has_small_image_stem(network):
        return None
    return (
        f"{architecture} gets a 3x3 stem, as small images lose much in its own 7x7 stem, but a step takes 7 to 13 "
        "times as long: set model.stem=large for its own, or choose a smaller network such as small_resnet18"
    )


def _use_small_image_stem(model: Any, in_channels: int) -> None:
    """Replace a timm ResNet's stem by one 3x3 stride-1 convolution of the same width, without max-pool."""
    width = [layer for layer in model.conv1.modules() if isinstance(layer, nn.Conv2d)][-1].out_channels
    model.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm does
    model.maxpool = nn.Identity()
