"""Datasets in folders of image files, one folder a class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .error_text import first_line, listed
from .splits import LabelledImages, Splits

DEFAULT_IMAGE_SIZE = 32


def load_image_folder(path: Path, size: int) -> Splits:
    """Read train/CLASS/*.jpg and test/CLASS/*.jpg at `size` pixels a side (any format that torchvision reads).

    The images are gray where every file is gray, and RGB otherwise.

    Raises:
        UserError: a folder is missing or empty, test/ has classes that train/ lacks, or a file cannot be read.
    """
    train, test = _open_split(path / "train"), _open_split(path / "test")
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise UserError(f"{path / 'test'} has classes that train/ lacks: {listed(unknown)}; make the folders match")
    train_images, train_gray = decode([Path(file) for file, _ in train.samples], size, size)
    test_images, test_gray = decode([Path(file) for file, _ in test.samples], size, size)
    if train_gray and test_gray:
        train_images, test_images = first_channel(train_images), first_channel(test_images)
    # A test folder may lack classes, so its own numbering is not the training folder's.
    test_labels = [train.class_to_idx[test.classes[label]] for _, label in test.samples]
    return Splits(
        LabelledImages(train_images, torch.tensor([label for _, label in train.samples])),
        LabelledImages(test_images, torch.tensor(test_labels)),
        tuple(train.classes),
    )


def decode(files: Sequence[Path], height: int, width: int) -> tuple[Tensor, bool]:
    """Read image files, cropped to the target's shape and resized.

    Returns:
        uint8 [n, 3, height, width], and whether all files were gray.

    Raises:
        UserError: a file cannot be read as an image.
    """
    from PIL import Image, ImageOps

    images = np.empty((len(files), height, width, 3), np.uint8)
    all_gray = True
    for index, file in enumerate(files):
        try:
            with Image.open(file) as image:
                all_gray = all_gray and image.mode in ("1", "L", "LA")
                images[index] = np.asarray(
                    ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BILINEAR)
                )
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{file} cannot be read as an image ({first_line(error)}); repair or remove it") from error
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), all_gray


def first_channel(images: Tensor) -> Tensor:
    """[n, 1, H, W] from gray images that were read as RGB, [n, 3, H, W]."""
    return images[:, :1].contiguous()


def _open_split(path: Path) -> Any:
    from torchvision.datasets import ImageFolder

    if not path.is_dir():
        raise UserError(f"there is no folder {path}; data.path must hold train/CLASS/ and test/CLASS/")
    try:
        return ImageFolder(str(path))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} needs one folder of images a class, none of them empty ({first_line(error)})"
        ) from error
