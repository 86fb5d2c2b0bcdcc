"""Images from a folder or an .npz file in the shape that an encoder takes, batch by batch, with a name for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.error_text import listed, printable
from ..data.file_listing import list_files, notify_of_left_out
from ..data.image_files import IMAGE_SUFFIXES, BrokenImageError, image_kind, read_pixels
from ..data.npz_archive import NpzArchive
from ..data.paths import kind_of
from ..data.pixels import channels_first, resize, to_uint8
from ..data.windows import Window
from ..errors import UserError
from ..evaluation.downstream import in_channels

#: the arrays of images that an .npz file may have, in the order in which they are read
_ARRAYS = ("x", "x_train", "x_val", "x_test", "train_images", "val_images", "test_images")


@dataclass(frozen=True)
class ImageBatch:
    """Some images.

    Attributes:
        names: of each image: a file's path seen from the folder, or `ARRAY/ROW` of an .npz file.
        images: uint8 [n, C, H, W]; n is 0 where no file of the batch can be read.
        unreadable: files of this part of the folder that cannot be read, each with the reason.
    """

    names: list[str]
    images: Tensor
    unreadable: list[str] = field(default_factory=list)


def image_batches(
    source: Path, shape: tuple[int, int, int], window: Window | None, batch_size: int
) -> tuple[int, Iterator[ImageBatch]]:
    """The images of a folder, nested or flat, or of an .npz file: cropped to the encoder's form and resized.

    A grey image becomes three equal channels for an encoder of colour images; a colour image becomes grey (luma) for
    an encoder of grey ones.

    Args:
        source: the folder or the file.
        shape: channels, height and width that the encoder takes.
        window: how pixels of more than 8 bits become 8 bits; None refuses such images.
        batch_size: the most images of a batch.

    Returns:
        The number of images or files, and the batches in their order.

    Raises:
        UserError: there is no such folder or file, it holds no images, or they need a window.
    """
    kind = kind_of(source)
    if kind == "missing":
        raise UserError(f"there is no folder or file {printable(source)}: expected a folder of images or an .npz file")
    if kind == "folder":
        listing = list_files(source)
        notify_of_left_out(listing.others, source)
        files = sorted(listing.images)
        if not files:
            raise UserError(
                f"{printable(source)} holds no image; expected files that end in {', '.join(IMAGE_SUFFIXES)}"
            )
        return len(files), _from_files(source, files, shape, window, batch_size)
    arrays = _read_arrays(source, window)
    return sum(map(len, arrays.values())), _from_arrays(arrays, shape, batch_size)


def _from_files(
    folder: Path, files: Sequence[Path], shape: tuple[int, int, int], window: Window | None, batch_size: int
) -> Iterator[ImageBatch]:
    channels, height, width = shape
    for start in range(0, len(files), batch_size):
        names, images, unreadable = [], [], []
        for file in files[start : start + batch_size]:
            try:
                if window is None and image_kind(file).deep != "no":
                    raise UserError(
                        f"{printable(file)} has pixels of more than 8 bits, and the encoder was trained on images of 8 "
                        "bits: give --window LOW HIGH, the values that become 0 and 255"
                    )
                images.append(read_pixels(file, height, width, channels, window))
                names.append(printable(file.relative_to(folder).as_posix()))
            except BrokenImageError as error:
                unreadable.append(f"{printable(file)} ({error})")
        pixels = torch.from_numpy(np.stack(images)) if images else torch.empty(0, *shape, dtype=torch.uint8)
        yield ImageBatch(names, pixels, unreadable)


def _read_arrays(path: Path, window: Window | None) -> dict[str, Tensor]:
    """The arrays of images of an .npz file, uint8 [n, C, H, W] by name."""
    with NpzArchive(path) as archive:
        names = [name for name in _ARRAYS if name in archive.names]
        names = names or (archive.names if len(archive.names) == 1 else [])
        if not names:
            raise UserError(
                f"{printable(path)} has the arrays {listed(archive.names)}; expected some of {', '.join(_ARRAYS)}, or "
                "a single one"
            )
        arrays = archive.read(names)
    pixels = to_uint8({f"{name} in {printable(path)}": arrays[name] for name in names}, window)
    return {name: channels_first(array, text) for name, (text, array) in zip(names, pixels.items(), strict=True)}


def _from_arrays(arrays: dict[str, Tensor], shape: tuple[int, int, int], batch_size: int) -> Iterator[ImageBatch]:
    channels, height, width = shape
    for name, array in arrays.items():
        for start in range(0, len(array), batch_size):
            images = in_channels(array[start : start + batch_size], channels)
            if images.shape[2:] != (height, width):
                images = resize(images, height, width)
            yield ImageBatch([f"{name}/{start + row}" for row in range(len(images))], images)
