"""Unlabelled public images from a file or folder of their own."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import UserError
from .decoding import Decoding, decode_images
from .error_text import listed, printable
from .file_listing import list_files, notify_of_left_out
from .npz_archive import NpzArchive
from .paths import kind_of
from .pixels import channels_first, resize, to_uint8
from .windows import Window

_KEYS = ("x", "x_train", "train_images")


def load_public_images(
    path: Path, shape: torch.Size, window: Window | None = None, broken: Literal["refuse", "skip"] = "refuse"
) -> Tensor:
    """Read the images of an .npz file or a folder and bring them to the training images' `shape` (C, H, W).

    Gray images become RGB where the training images are in colour.

    Returns:
        uint8 [n, C, H, W].

    Raises:
        UserError: nothing can be read there, or the images are in colour and the training images are gray.
    """
    channels, height, width = shape
    kind = kind_of(path)
    if kind == "missing":
        raise UserError(
            f"there is no file or folder {printable(path)}; set data.public_path to an .npz or an image folder, or use "
            "data.public_holdout=NUMBER"
        )
    images = _read_folder(path, height, width, window, broken) if kind == "folder" else _read_npz(path, window)
    if images.shape[1] == 3 and channels == 1:
        raise UserError(
            f"the public images of {printable(path)} are in colour but the training images are gray; "
            "convert them to gray, or set data.public_holdout instead of data.public_path"
        )
    if images.shape[2:] != (height, width):
        images = resize(images, height, width)
    return images.expand(-1, channels, -1, -1).contiguous()


def _read_folder(
    path: Path, height: int, width: int, window: Window | None, broken: Literal["refuse", "skip"]
) -> Tensor:
    listing = list_files(path)
    notify_of_left_out(listing.others, path)
    if not listing.images:
        raise UserError(
            f"{printable(path)} holds no image; data.public_path must name a folder with images or an .npz file"
        )
    images = decode_images(sorted(listing.images), Decoding(height, width, window, broken)).images
    assert isinstance(images, Tensor)
    return images


def _read_npz(path: Path, window: Window | None) -> Tensor:
    with NpzArchive(path) as archive:
        only_key = archive.names if len(archive.names) == 1 else []
        keys = [key for key in _KEYS if key in archive.names] or only_key
        if not keys:
            raise UserError(
                f"{printable(path)} has the arrays {listed(archive.names)}; expected one of {', '.join(_KEYS)}, or a "
                "single array"
            )
        array = archive.read(keys[:1])[keys[0]]
    name = f"{printable(keys[0])} in {printable(path)}"
    return channels_first(to_uint8({name: array}, window)[name], name)
