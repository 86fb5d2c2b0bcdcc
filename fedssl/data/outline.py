"""What a data set holds, told from names and headers alone: no image is decoded, and torch is not imported."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

_SAMPLED = 32  # image files whose headers are read
_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".jfif", ".dcm")
_IMAGE_KEYS = ("x_train", "train_images", "x")
_LABEL_KEYS = ("y_train", "train_labels", "y")
# Of files of several sizes, the images are brought to the largest of these that is not above their median side.
_SIZES = (32, 64, 96, 128)


@dataclass(frozen=True)
class DataOutline:
    """A data set's training images.

    Attributes:
        images: how many there are; 0 where that is unknown.
        channels: 1 where all are grey, else 3.
        side: their shorter side in pixels; of image files, the side to which they are brought.
        labelled: whether they have labels.
        from_files: whether they are image files, which have to be brought to one size.
    """

    images: int
    channels: int
    side: int
    labelled: bool
    from_files: bool = False


_BUILT_IN = {
    "digits": DataOutline(1437, 1, 8, True),
    "cifar10": DataOutline(50_000, 3, 32, True),
    "cifar100": DataOutline(50_000, 3, 32, True),
    "fashion_mnist": DataOutline(60_000, 1, 28, True),
}


def outline(data: Mapping[str, Any]) -> DataOutline | None:
    """What the data set holds that a recipe's `data` names, before the recipe is checked.

    Returns:
        None where `data` is not of a form that a recipe may have; the recipe's checks say why.

    Raises:
        UserError: the file or folder is missing, or nothing can be told from it.
    """
    name, path = data.get("name", "digits"), data.get("path")
    if name == "none":
        return _of_shape(data.get("image_shape"))
    if name in _BUILT_IN:
        return _with_size(_BUILT_IN[name], data)
    if name not in ("npz", "folder", "images") or not isinstance(path, (str, Path)):
        return None
    place = Path(path)
    try:
        place = place.expanduser()
    except RuntimeError as error:
        raise UserError(f"data.path: {path} names the home folder of an unknown user; give another path") from error
    if not place.exists():
        raise UserError(f"data.path: there is no file or folder {place}")
    if place.is_file() and name != "folder":
        return _with_size(_of_npz(place), data)
    if not place.is_dir() or name == "npz":
        return None
    labelled = name == "folder" or data.get("labels") is not None
    return _with_size(_of_files(place, labelled), data)


def _with_size(known: DataOutline, data: Mapping[str, Any]) -> DataOutline:
    """With the images' side and number as `data` limits them."""
    size, limit = data.get("image_size"), data.get("train_limit")
    side = size if isinstance(size, int) and size > 0 else known.side
    images = min(known.images, limit) if isinstance(limit, int) and limit > 0 else known.images
    return DataOutline(images, known.channels, side, known.labelled, known.from_files)


def _of_shape(shape: Any) -> DataOutline | None:
    """Of the sites' images, whose number nobody else knows."""
    if not isinstance(shape, list) or len(shape) != 3 or not all(isinstance(size, int) for size in shape):
        return None
    return DataOutline(0, shape[0], min(shape[1:]), False)


def _of_npz(path: Path) -> DataOutline:
    """Reads the header of the array with the training images."""
    import numpy as np

    try:
        with zipfile.ZipFile(path) as archive:
            keys = [name.removesuffix(".npy") for name in archive.namelist()]
            chosen = next((key for key in _IMAGE_KEYS if key in keys), keys[0] if len(keys) == 1 else None)
            if chosen is None:
                raise ValueError(f"it holds none of {', '.join(_IMAGE_KEYS)}")
            with archive.open(f"{chosen}.npy") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, _ = read(file)
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(f"data.path: {path} cannot be read as an .npz file of images ({error})") from error
    if len(shape) not in (3, 4):
        raise UserError(f"data.path: {chosen} in {path} has shape {list(shape)}; expected [n, H, W] or [n, H, W, C]")
    last = len(shape) == 4 and shape[3] in (1, 3)
    height, width = shape[1:3] if last or len(shape) == 3 else shape[2:4]
    channels = 1 if len(shape) == 3 else shape[3] if last else shape[1]
    return DataOutline(shape[0], channels, min(height, width), any(key in keys for key in _LABEL_KEYS))


def _of_files(path: Path, labelled: bool) -> DataOutline:
    """Reads the headers of some image files, evenly spread over the folder."""
    from PIL import Image

    files = _image_files(path / "train" if (path / "train").is_dir() else path)
    if not files:
        raise UserError(f"data.path: {path} holds no image ({', '.join(_SUFFIXES)})")
    sides, channels = [], 1
    for file in files[:: -(-len(files) // _SAMPLED)]:
        try:
            with Image.open(file) as image:
                sides.append(image.size)
                channels = channels if image.mode in ("1", "L", "LA") or image.mode[0] in "IF" else 3
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue  # loading the data names files that cannot be read
    one_square = len(set(sides)) == 1 and sides[0][0] == sides[0][1] <= _SIZES[-1]
    shorter = sorted(min(size) for size in sides) or [_SIZES[-1]]
    median = shorter[len(shorter) // 2]
    side = median if one_square else max((size for size in _SIZES if size <= median), default=_SIZES[0])
    return DataOutline(len(files), channels, side, labelled, from_files=True)


def _image_files(path: Path) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(one for one in folders if not one.startswith((".", "__")))
        files += [Path(folder, one) for one in sorted(names) if one.lower().endswith(_SUFFIXES)]
    return files
