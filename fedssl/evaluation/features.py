"""Representations of a set of images from a frozen encoder: the input of every offline evaluation."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import UserError


def extract_features(
    encoder: nn.Module, images: Tensor, *, batch_size: int = 500, device: torch.device | str | None = None
) -> Tensor:
    """The encoder's representations of `images`, without augmentation and without gradients.

    Every submodule runs in evaluation mode (BatchNorm with its running statistics) and gets its own mode
    back.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d].
        images: uint8 [n, C, H, W], n at least 1.
        batch_size: images a forward pass; bounds the memory and does not matter otherwise.
        device: where to compute; the encoder is moved there and back. None: where the encoder is.

    Returns:
        float32 [n, d] on the CPU.

    Raises:
        UserError: wrong dtype or shape of the images, or the encoder does not give one vector an image.
    """
    from ..data.augmentation import normalize

    check_images("images", images)
    return _extract(encoder, images, normalize, batch_size, device)


def extract_view_features(
    encoder: nn.Module, views: Tensor, *, batch_size: int = 500, device: torch.device | str | None = None
) -> Tensor:
    """`extract_features` of augmented views, normalised float32 [n, C, H, W] as `augment` gives them."""
    return _extract(encoder, views, lambda batch: batch, batch_size, device)


def _extract(
    encoder: nn.Module,
    images: Tensor,
    prepare: Callable[[Tensor], Tensor],
    batch_size: int,
    device: torch.device | str | None,
) -> Tensor:
    if batch_size < 1:
        raise UserError(f"batch_size: expected at least 1, got {batch_size}")
    home = device_of(encoder)
    device = home if device is None else torch.device(device)
    modes = {module: module.training for module in encoder.modules()}
    batches = []
    try:
        encoder.to(device).eval()
        with torch.no_grad():
            for batch in images.split(batch_size):
                output = encoder(prepare(batch.to(device)))
                if output.dim() != 2 or len(output) != len(batch):
                    raise UserError(
                        f"encoder: expected an output of shape [{len(batch)}, d] for {len(batch)} images, "
                        f"got {list(output.shape)}"
                    )
                batches.append(output.to("cpu", torch.float32))
    finally:
        encoder.to(home)
        # One by one, as train() on a parent would overwrite the mode of a submodule that is meant to differ.
        for module, mode in modes.items():
            module.training = mode
    return torch.cat(batches)


def check_images(name: str, images: Tensor) -> None:
    """Raise a UserError that begins with `name` unless `images` is uint8 [n, C, H, W] with n at least 1."""
    if images.dtype != torch.uint8 or images.dim() != 4 or len(images) == 0:
        raise UserError(
            f"{name}: expected at least one image as uint8 [n, C, H, W], got {images.dtype} {list(images.shape)}"
        )


def check_features(name: str, features: Tensor) -> None:
    """Raise a UserError that begins with `name` unless `features` is finite and floating point [n, d].

    n and d must be at least 1.
    """
    if not features.is_floating_point() or features.dim() != 2 or features.numel() == 0:
        raise UserError(
            f"{name}: expected a floating-point matrix [n, d] with at least one row and column, "
            f"got {features.dtype} {list(features.shape)}"
        )
    if not torch.isfinite(features).all():
        raise UserError(f"{name}: contains NaN or infinite values, so training has diverged; lower the learning rate")


def check_labels(name: str, labels: Tensor, count: int, classes: int | None = None) -> None:
    """Raise a UserError that begins with `name` unless `labels` holds class indices, integer [count].

    Each must be at least 0, and below `classes` where that is given.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"{name}: expected integer class indices, got {labels.dtype}")
    if labels.shape != (count,):
        raise UserError(f"{name}: expected one label a sample, shape [{count}], got {list(labels.shape)}")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or (classes is not None and highest >= classes):
        expected = "at least 0" if classes is None else f"from 0 to {classes - 1}"
        raise UserError(f"{name}: expected class indices {expected}, got {lowest} to {highest}")


def check_same_width(train_features: Tensor, test_features: Tensor) -> None:
    """Raise a UserError unless both sets of representations have the same dimension."""
    if train_features.shape[1] != test_features.shape[1]:
        raise UserError(
            "test_features: expected the dimension of train_features, "
            f"{train_features.shape[1]}, got {test_features.shape[1]}"
        )


def device_of(encoder: nn.Module) -> torch.device:
    """Where the encoder's first parameter or buffer is; the CPU where it has none."""
    for tensor in (*encoder.parameters(), *encoder.buffers()):
        return tensor.device
    return torch.device("cpu")
