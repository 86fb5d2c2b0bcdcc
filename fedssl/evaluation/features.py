"""The representations of images by a frozen encoder, the input of every offline evaluation."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from ..data.pixels import normalize
from ..data.stored_images import Images
from ..errors import UserError
from ..models.precision import with_channels_last

# What measuring takes on a GPU, in units of the features' size: standardising forms float64 copies.
_WORKING_COPIES = 8
# Bound the memory of a forward pass; results depend on them by rounding alone. A processor's cache holds what a layer
# makes of 64 small images: EfficientNet-Lite0 at 64 pixels takes 2.5 times as long with 500, ResNet-18 at 96 1.4 times.
_IMAGES_AT_A_TIME = {"cpu": 64, "cuda": 500}
_PIXELS_AT_A_TIME = 500 * 64 * 64


def images_at_a_time(images: Images, most: int) -> int:
    """Return how many images a forward pass takes: at most so many, and fewer where they have many pixels."""
    return max(1, min(most, _PIXELS_AT_A_TIME // (images.shape[-2] * images.shape[-1])))


def extract_features(encoder: nn.Module, images: Images, prepare: Callable[[Tensor], Tensor] = normalize) -> Tensor:
    """Return the encoder's representations [n, d] of uint8 `images` [n, C, H, W], n at least 1: float32 on the CPU.

    Images are normalised by `prepare`, but not augmented; there are no gradients. Every submodule runs in evaluation
    mode (BatchNorm with its running statistics) and gets its own mode back. A representation that is not finite raises
    a UserError.
    """
    features = extract_outputs(encoder, images, prepare)
    require_finite("representations", features)
    return features


def extract_outputs(network: nn.Module, images: Images, prepare: Callable[[Tensor], Tensor] = normalize) -> Tensor:
    """Return `extract_features` for any network and preparation, without the check that the outputs are finite."""
    device = device_of(network)
    modes = {module: module.training for module in network.modules()}
    outputs = []
    try:
        network.eval()
        with torch.no_grad():
            for batch in images.split(images_at_a_time(images, _IMAGES_AT_A_TIME[device.type])):
                prepared = with_channels_last(prepare(batch.to(device)))  # as in training, and faster
                outputs.append(network(prepared).to("cpu", torch.float32))
    finally:
        # One by one: train() on a parent would overwrite the mode of a submodule that is meant to differ.
        for module, mode in modes.items():
            module.training = mode
    return torch.cat(outputs)


def measured_on(device: torch.device, *features: Tensor) -> tuple[Tensor, ...]:
    """Return features on the device that is to compare or train on them; on the CPU where a GPU has no room for it."""
    if device.type == "cuda":
        needed = _WORKING_COPIES * sum(part.nbytes for part in features)
        if needed > torch.cuda.mem_get_info(device)[0]:
            return features
    return tuple(part.to(device) for part in features)


def require_finite(name: str, features: Tensor) -> None:
    """Raise a UserError that begins with `name` where `features` have NaN or infinite values."""
    if not torch.isfinite(features).all():
        raise UserError(
            f"{name}: contains NaN or infinite values, so training has diverged; lower training.learning_rate"
        )


def device_of(network: nn.Module) -> torch.device:
    """Return the device of the network's first parameter or buffer; the CPU for a network without any."""
    first = next(chain(network.parameters(), network.buffers()), None)
    return torch.device("cpu") if first is None else first.device
