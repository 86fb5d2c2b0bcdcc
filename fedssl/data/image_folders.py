"""Datasets in folders of image files, one folder a class."""

from pathlib import Path
from typing import Literal

import torch

from ..errors import UserError
from .decoding import decode_images
from .error_text import listed, printable
from .file_listing import list_files, notify_of_left_out, subfolders
from .paths import kind_of
from .splits import LabelledImages, Splits
from .windows import Window

DEFAULT_IMAGE_SIZE = 32


def load_image_folder(
    path: Path, size: int, window: Window | None = None, broken: Literal["refuse", "skip"] = "refuse"
) -> Splits:
    """Read train/CLASS/*.jpg and test/CLASS/*.jpg at `size` pixels a side.

    The images are gray where every file is gray, and RGB otherwise.

    Raises:
        UserError: a folder is missing or empty, test/ has classes that train/ lacks, or files cannot be read.
    """
    train, test = _files_by_class(path / "train", path), _files_by_class(path / "test", path)
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise UserError(
            f"{printable(path / 'test')} has classes that train/ lacks: {listed(unknown)}; make the folders match"
        )
    classes = list(train)
    labelled = [
        (file, classes.index(name)) for split in (train, test) for name, files in split.items() for file in files
    ]
    decoded = decode_images([file for file, _ in labelled], size, size, window, broken)
    labels = torch.tensor([labelled[index][1] for index in decoded.kept])
    of_train = sum(map(len, train.values()))
    count = sum(index < of_train for index in decoded.kept)
    splits = (
        LabelledImages(decoded.images[:count], labels[:count]),
        LabelledImages(decoded.images[count:], labels[count:]),
    )
    for name, split in zip(("train", "test"), splits, strict=True):
        if len(split.labels) == 0:
            raise UserError(f"none of the files in {printable(path / name)} can be read; repair or replace them")
    return Splits(*splits, tuple(map(printable, train)))


def _files_by_class(split: Path, root: Path) -> dict[str, list[Path]]:
    """The image files of each class, by its folder's name; what is left out is named to the user."""
    if kind_of(split) != "folder":
        raise UserError(f"there is no folder {printable(split)}; data.path must hold train/CLASS/ and test/CLASS/")
    listing = list_files(split)
    files_of: dict[str, list[Path]] = {folder.name: [] for folder in subfolders(split)}
    loose: list[Path] = []
    for file in listing.images:
        folder, *rest = file.relative_to(split).parts
        (files_of[folder] if rest else loose).append(file)
    notify_of_left_out([*loose, *listing.others], root)
    empty = [name for name, files in files_of.items() if not files]
    if not files_of or empty:
        what = f"; without an image: {listed(empty)}" if empty else ""
        raise UserError(f"{printable(split)} needs one folder of images a class, none of them empty{what}")
    return files_of
