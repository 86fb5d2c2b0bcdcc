"""Images from a folder or an .npz file in the shape that an encoder takes, batch by batch, with a name for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..data.error_text import listed
from ..data.image_folders import decode, first_channel
from ..data.npz import open_npz, read_array
from ..data.pixels import channels_first, resize, to_uint8
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


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder and the folders in it, sorted by path.

    Raises:
        UserError: there are none.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS and file.is_file())
    if not files:
        raise UserError(f"{folder} holds no image; expected files that end in {', '.join(IMG_EXTENSIONS)}")
    return files


def image_batches(source: Path, shape: tuple[int, int, int], batch_size: int) -> tuple[int, Iterator[ImageBatch]]:
    """The images of a folder, nested or flat, or of an .npz file: cropped to the encoder's form and resized.

    A grey image becomes three equal channels for an encoder of colour images; a colour image becomes grey (luma) for
    an encoder of grey ones.

    Args:
        source: the folder or the file.
        shape: channels, height and width that the encoder takes.
        batch_size: the most images of a batch.

    Returns:
        The number of images or files, and the batches in their order.

    Raises:
        UserError: there is no such folder or file, or it holds no images.
    """
    if source.is_dir():
        files = image_files(source)
        return len(files), _from_files(source, files, shape, batch_size)
    if not source.exists():
        raise UserError(f"there is no folder or file {source}: expected a folder of images or an .npz file")
    arrays = _read_arrays(source)
    return sum(map(len, arrays.values())), _from_arrays(arrays, shape, batch_size)


def _from_files(
    folder: Path, files: Sequence[Path], shape: tuple[int, int, int], batch_size: int
) -> Iterator[ImageBatch]:
    channels, height, width = shape
    for start in range(0, len(files), batch_size):
        names, images, unreadable = [], [], []
        for file in files[start : start + batch_size]:
            try:
                image, grey = decode([file], height, width)
            except UserError as error:
                unreadable.append(str(error))
                continue
            names.append(file.relative_to(folder).as_posix())
            images.append(in_channels(first_channel(image) if grey else image, channels))
        yield ImageBatch(names, torch.cat(images) if images else torch.empty(0, *shape), unreadable)


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of images of an .npz file, uint8 [n, C, H, W] by name."""
    with open_npz(path) as archive:
        names = [name for name in _ARRAYS if name in archive.files]
        names = names or (archive.files if len(archive.files) == 1 else [])
        if not names:
            raise UserError(
                f"{path} has the arrays {listed(archive.files)}; expected some of {', '.join(_ARRAYS)}, or a single one"
            )
        arrays = {name: read_array(archive, path, name) for name in names}
    pixels = to_uint8({f"{name} in {path}": array for name, array in arrays.items()})
    return {name: channels_first(array, text) for name, (text, array) in zip(names, pixels.items(), strict=True)}


def _from_arrays(arrays: dict[str, Tensor], shape: tuple[int, int, int], batch_size: int) -> Iterator[ImageBatch]:
    channels, height, width = shape
    for name, array in arrays.items():
        for start in range(0, len(array), batch_size):
            images = in_channels(array[start : start + batch_size], channels)
            if images.shape[2:] != (height, width):
                images = resize(images, height, width)
            yield ImageBatch([f"{name}/{start + row}" for row in range(len(images))], images)
