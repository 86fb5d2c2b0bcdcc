"""Unlabelled public images from a file or folder of their own."""

from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from .error_text import listed
from .image_folders import decode, first_channel
from .npz import open_npz, read_array
from .pixels import channels_first, resize, to_uint8

_KEYS = ("x", "x_train", "train_images")


def load_public_images(path: Path, shape: torch.Size) -> Tensor:
    """Read the images of an .npz file or a folder and bring them to the training images' `shape` (C, H, W).

    Gray images become RGB where the training images are in colour.

    Returns:
        uint8 [n, C, H, W].

    Raises:
        UserError: nothing can be read there, or the images are in colour and the training images are gray.
    """
    channels, height, width = shape
    if not path.exists():
        raise UserError(
            f"there is no file or folder {path}; set data.public_path to an .npz or an image folder, or use "
            "data.public_holdout=NUMBER"
        )
    images = _read_folder(path, height, width) if path.is_dir() else _read_npz(path)
    if images.shape[1] == 3 and channels == 1:
        raise UserError(
            f"the public images of {path} are in colour but the training images are gray; "
            "convert them to gray, or set data.public_holdout instead of data.public_path"
        )
    if images.shape[2:] != (height, width):
        images = resize(images, height, width)
    return images.expand(-1, channels, -1, -1).contiguous()


def _read_folder(path: Path, height: int, width: int) -> Tensor:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS and file.is_file())
    if not files:
        raise UserError(f"{path} holds no image; data.public_path must name a folder with images or an .npz file")
    images, all_gray = decode(files, height, width)
    return first_channel(images) if all_gray else images


def _read_npz(path: Path) -> Tensor:
    with open_npz(path) as archive:
        only_key = archive.files if len(archive.files) == 1 else []
        keys = [key for key in _KEYS if key in archive.files] or only_key
        if not keys:
            raise UserError(
                f"{path} has the arrays {listed(archive.files)}; expected one of {', '.join(_KEYS)}, or a single array"
            )
        array = read_array(archive, path, keys[0])
    name = f"{keys[0]} in {path}"
    return channels_first(to_uint8({name: array})[name], name)
