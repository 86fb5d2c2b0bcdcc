"""The operations of augmentation, in torchvision's definitions, for a whole batch at once.

Each is a plain function of float32 images [n, C, H, W] in [0, 1] and of one parameter an image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_resize(images: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Cut box i from image i, stretch it to the image's size, and swap left and right where mirrored[i].

    images [n, C, H, W]; boxes int64 [n, 4]: top, left, height, width; mirrored bool [n]. Bilinear. A box is
    never larger than the image, so this never shrinks and needs no filter against aliasing.
    """
    height, width = images.shape[2:]
    rows = _sample_positions(boxes[:, 0], boxes[:, 2], height)
    columns = _sample_positions(boxes[:, 1], boxes[:, 3], width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    x, y = columns[:, None, :].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)
    grid = torch.stack((x, y), dim=3)
    return F.grid_sample(images, grid, mode="bilinear", align_corners=False)


def _sample_positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """[n, size]: where to read for each output pixel, as grid_sample counts (-1 and 1 are the edges)."""
    start, length = start[:, None].float(), length[:, None].float()
    pixels = start + (torch.arange(size, device=start.device) + 0.5) * (length / size) - 0.5
    # Half a pixel beyond the box belongs to its neighbours: repeat the box's border instead.
    pixels = torch.minimum(torch.maximum(pixels, start), start + length - 1)
    return (2 * pixels + 1) / size - 1


def to_gray(images: Tensor) -> Tensor:
    """RGB [n, 3, H, W] to luma [n, 1, H, W] by the ITU-R 601 weights."""
    weights = torch.tensor([[0.2989, 0.587, 0.114]], device=images.device)
    return (weights @ images.flatten(2)).unflatten(2, images.shape[2:])


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply image i by factors[i] ([n], >= 0): 0 is black, 1 changes nothing."""
    return (images * factors[:, None, None, None]).clamp_(0, 1)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Stretch image i about its mean luma by factors[i] ([n], >= 0): 0 is uniform gray, 1 changes nothing."""
    gray = to_gray(images) if images.shape[1] == 3 else images
    return _blend(images, gray.mean((1, 2, 3), keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Stretch RGB image i about its gray version by factors[i] ([n], >= 0): 0 is gray, 1 changes nothing."""
    return _blend(images, to_gray(images), factors)


def _blend(images: Tensor, centres: Tensor, factors: Tensor) -> Tensor:
    return torch.lerp(centres.expand_as(images), images, factors[:, None, None, None]).clamp_(0, 1)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the HSV hue of RGB image i by shifts[i] ([n], in turns, -0.5 to 0.5)."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    # Which channel is the largest, as 0 or 1: on a CPU this takes a fraction of the time of booleans.
    is_red = 1 - (value - red).sign_()
    is_blue = (1 - is_red).mul_((value - green).sign_())
    is_green = 1 - is_red - is_blue
    # Hue in sixths of a turn. A pixel without chroma is gray, whatever hue it gets.
    hue = is_red.mul_(green - blue)
    hue += is_green * (blue - red)
    hue += is_blue * (red - green)
    hue /= chroma.clamp_min(1e-12)
    hue += 2 * is_green + 4 * is_blue + 6 * shifts[:, None, None]
    # Channel c is value - chroma * clamp(min(k, 4 - k), 0, 1) with k = (hue + c's offset) mod 6.
    k = hue[:, None] + torch.tensor([5.0, 3.0, 1.0], device=images.device)[:, None, None]
    k -= (k / 6).floor_().mul_(6)
    distance = torch.minimum(k, 4 - k).clamp_(0, 1)
    return value[:, None] - distance.mul_(chroma[:, None])


def blur_kernel_size(height: int, width: int) -> int:
    """The odd number nearest to a tenth of the shorter side, at least 3 (SimCLR, appendix A)."""
    return max(3, 2 * round((min(height, width) / 10 - 1) / 2) + 1)


def gaussian_blur(images: Tensor, sigmas: Tensor, kernel_size: int) -> Tensor:
    """Blur image i with standard deviation sigmas[i] ([n], pixels > 0), borders reflected.

    `kernel_size` is odd and less than twice the shorter side.
    """
    radius = kernel_size // 2
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    kernels = torch.softmax(-0.5 * (offsets / sigmas[:, None]) ** 2, dim=1)
    images = F.pad(images, [radius] * 4, mode="reflect")
    # Each image has its own kernel: summing shifted images is faster than a convolution of n C groups.
    for dimension in (2, 3):
        size = images.shape[dimension] - 2 * radius
        blurred = images.narrow(dimension, 0, size) * kernels[:, 0, None, None, None]
        for shift in range(1, kernel_size):
            blurred.addcmul_(images.narrow(dimension, shift, size), kernels[:, shift, None, None, None])
        images = blurred
    return images


def solarize(images: Tensor) -> Tensor:
    """Invert the values of 0.5 and more: [n, C, H, W], 0 to 1."""
    return torch.where(images >= 0.5, 1 - images, images)
