"""Two random views of each image with BYOL's augmentation: 32, 96 and 224 pixels, uint8 in, normalised float32 out.

The error is against the same parameters in plain PyTorch (fedkernels/reference/two_views.py), relative to the largest
entry. The peers draw other random numbers from the same distributions, so they have no error. Times are for both views
of the whole batch. The first peer is what fedssl used before (batched_augmentation.py). One size measures memory alone,
with 16 times the images of the first: what is needed beyond the outputs must not grow with them.
"""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.batched_augmentation import augment
from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work
from fedkernels import ViewKey, ViewOptions, two_views, view_parameters
from fedkernels.reference.two_views import blur_kernel_size
from fedkernels.reference.two_views import two_views as reference

OPTIONS = ViewOptions()
KEY = ViewKey(seed=0, client=1, round=2, epoch=3)
BATCHED = "plain PyTorch, batched"
KORNIA = "kornia, batched"
LOADER = "torchvision in a DataLoader with two workers"
SIZES = ((128, 32), (64, 96), (16, 224))  # images, pixels of a side
MEMORY_SIZE = (2048, 32)


def cases(quick: bool) -> tuple[Case, ...]:
    timed = tuple(_case(count, side) for count, side in (((4, 12),) if quick else SIZES))
    return (*timed, _memory_case(*((64, 12) if quick else MEMORY_SIZE)))


CURVE = "pixels of an image's side"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the side of the images, with about as many pixels in all."""
    sizes = ((4, 8), (4, 12)) if quick else ((128, 32), (16, 96), (4, 224))
    return {side: _case(count, side) for count, side in sizes}


def _case(count: int, side: int) -> Case:
    return Case(
        size=f"{count} images of 3 x {side} x {side}",
        inputs=partial(_inputs, count, side),
        tiny=partial(_inputs, 2, 8),
        implementations=(
            Implementation("fedkernels.two_views", _ours),
            *_batched_peers(),
            Implementation(LOADER, _loader, package="torchvision", note="PIL images, workers that stay"),
        ),
        truth=_truth,
        floor=Floor("a conversion of the images to float32 for each view", _floor),
        bars=(
            Bar(faster_than=(BATCHED,), times=4.0),
            Bar(faster_than=(KORNIA,), times=10.0),
            Bar(faster_than=(LOADER,), times=20.0),
            Bar(extra_mib=8.0),
            Bar(error=1e-5),
        ),
    )


def _batched_peers() -> tuple[Implementation, ...]:
    return (
        Implementation(BATCHED, _batched, note="fedssl's earlier augmentation; one order of the jitter a batch"),
        Implementation(KORNIA, _kornia, package="kornia", note="each image its own parameters, one order a batch"),
    )


def _memory_case(count: int, side: int) -> Case:
    return Case(
        size=f"{count} images of 3 x {side} x {side}, memory alone",
        inputs=partial(_inputs, count, side),
        tiny=partial(_inputs, 2, 8),
        implementations=(
            Implementation("fedkernels.two_views", _ours),
            *_batched_peers(),
        ),
        bars=(Bar(extra_mib=8.0),),
        timed=False,
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    return tuple(
        _gpu_case(count, side) for count, side in (((3, 12),) if quick else ((4096, 32), (512, 96), (128, 224)))
    )


def _gpu_case(count: int, side: int) -> Case:
    pixels = count * 3 * side * side
    return Case(
        size=f"{count} images of 3 x {side} x {side}",
        inputs=partial(_inputs, count, side),
        implementations=(
            Implementation("fedkernels.two_views", _ours),
            Implementation("fedkernels.reference.two_views", _truth, note="plain PyTorch, the same parameters"),
        ),
        truth=_truth,
        work=Work(pixels * (1.0 + 2 * 4), "copy", "the images read once, both views written"),
        bars=(Bar(milliseconds=2e3 * count / 2e6),) if side == 32 else (),  # 2 million views a second
    )


def _inputs(count: int, side: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    return {"images": images.to(device), "samples": torch.arange(count, device=device)}


def _ours(inputs: Inputs) -> Outputs:
    first, second = two_views(inputs["images"], inputs["samples"], KEY, OPTIONS)
    return {"value": first, "value of the second": second}


def _truth(inputs: Inputs) -> Outputs:
    images = inputs["images"]
    height, width = images.shape[2:]
    drawn = view_parameters(inputs["samples"], KEY, height, width, OPTIONS)
    first, second = reference(images, drawn, OPTIONS)
    return {"value": first, "value of the second": second}


def _floor(inputs: Inputs) -> Callable[[], None]:
    images: Tensor = inputs["images"]
    views = [torch.empty(images.shape) for _ in range(2)]

    def convert() -> None:
        for view in views:
            view.copy_(images)

    return convert


# Peers


def _batched(inputs: Inputs) -> Outputs:
    generator = torch.Generator().manual_seed(0)
    return {f"{view} view": augment(inputs["images"], OPTIONS, generator) for view in ("first", "second")}


def _kornia(inputs: Inputs) -> Outputs:
    images: Tensor = inputs["images"].float() / 255
    transform = kornia_transform(*images.shape[2:])
    return {"first view": transform(images), "second view": transform(images)}


@cache
def kornia_transform(height: int, width: int) -> Callable[[Tensor], Tensor]:
    """kornia's augmentation of a batch with the operations of `OPTIONS`."""
    kornia = importlib.import_module("kornia.augmentation")
    kernel, o = blur_kernel_size(height, width), OPTIONS
    middle, spread = torch.full((3,), 0.5), torch.full((3,), 0.25)
    return torch.nn.Sequential(
        kornia.RandomResizedCrop((height, width), scale=o.crop_scale, ratio=o.crop_ratio),
        kornia.RandomHorizontalFlip(p=o.flip),
        kornia.ColorJitter(o.brightness, o.contrast, o.saturation, o.hue, p=o.jitter_probability),
        kornia.RandomGrayscale(p=o.grayscale),
        kornia.RandomGaussianBlur((kernel, kernel), o.blur_sigma, p=o.blur),
        kornia.Normalize(middle, spread),
    )


class _Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Two views of each image, one image at a time."""

    def __init__(self, images: Tensor) -> None:
        transforms = importlib.import_module("torchvision.transforms")
        height, width = images.shape[2:]
        o = OPTIONS
        jitter = transforms.ColorJitter(o.brightness, o.contrast, o.saturation, o.hue)
        blur = transforms.GaussianBlur(blur_kernel_size(height, width), o.blur_sigma)
        self.images = [transforms.functional.to_pil_image(image) for image in images]
        self.transform: Any = transforms.Compose(
            [
                transforms.RandomResizedCrop((height, width), o.crop_scale, o.crop_ratio),
                transforms.RandomHorizontalFlip(o.flip),
                transforms.RandomApply([jitter], o.jitter_probability),
                transforms.RandomGrayscale(o.grayscale),
                transforms.RandomApply([blur], o.blur),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return self.transform(image), self.transform(image)


_loaders: dict[int, DataLoader[tuple[Tensor, Tensor]]] = {}  # by the images' memory: workers start once


def _loader(inputs: Inputs) -> Outputs:
    images: Tensor = inputs["images"]
    if images.data_ptr() not in _loaders:
        batch = max(1, len(images) // 8)  # both workers have several batches to prepare
        _loaders[images.data_ptr()] = DataLoader(
            _Pairs(images), batch_size=batch, num_workers=2, persistent_workers=True
        )
    pairs = list(_loaders[images.data_ptr()])
    return {"first view": torch.cat([one for one, _ in pairs]), "second view": torch.cat([two for _, two in pairs])}
