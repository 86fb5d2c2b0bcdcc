"""Datasets in .npz files."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError
from .error_text import listed, printable
from .npz_archive import NpzArchive
from .pixels import channels_first, to_uint8
from .splits import LabelledImages, Splits, unlabelled
from .windows import Window

_TRAIN_AND_TEST_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_VALIDATION_KEYS = (("x_val", "y_val"), ("val_images", "val_labels"))
_MOST_CLASSES = 65536


def load_npz(path: Path, window: Window | None = None) -> Splits:
    """Read the training, test and, if there is one, validation split of an .npz file.

    A file without any labels is a dataset without labels; then the test images may be missing. Labels [n, labels] of 0
    and 1 are several labels an image: they are used in evaluation alone.

    Raises:
        UserError: the file is missing or unreadable, or its arrays do not fit together.
    """
    with NpzArchive(path) as archive:
        unlabelled_keys = _unlabelled_keys(archive.names)
        if unlabelled_keys:
            return _without_labels(archive.read(unlabelled_keys), path, window)
        keys = _split_keys(archive.names, path)
        wanted = [key for pair in keys for key in pair]
        names = "class_names" if "class_names" in archive.names else None
        arrays = archive.read([*wanted, *([names] if names else [])])

    if all(_is_multi_label(arrays[label_key]) for _, label_key in keys):
        return _with_several_labels(keys, arrays, path, window)
    labels = []
    for image_key, label_key in keys:
        images, label_array = arrays[image_key], arrays[label_key]
        labels.append(_to_labels(label_array, f"{label_key} in {printable(path)}"))
        if images.ndim and len(images) != len(label_array):
            raise UserError(
                f"{printable(path)}: {image_key} has {len(images)} images but {label_key} has {len(label_array)} "
                "labels; they must match"
            )
    pixels = to_uint8({f"{key} in {printable(path)}": arrays[key] for key, _ in keys}, window)
    tensors = [channels_first(array, name) for name, array in pixels.items()]
    splits = [LabelledImages(*pair) for pair in zip(tensors, labels, strict=True)]
    classes = 1 + int(max(split.labels.max() for split in splits))
    class_names = _class_names(arrays.get("class_names"), classes, path)
    return Splits(splits[0], splits[1], class_names, splits[2] if len(splits) > 2 else None)


def _unlabelled_keys(names: list[str]) -> list[str]:
    """The names of the training and, if there are any, the test images in a file without labels; else none."""
    present = set(names)
    if present & {key for keys in _TRAIN_AND_TEST_KEYS for key in keys[1::2]}:
        return []
    for train, _, test, _ in _TRAIN_AND_TEST_KEYS:
        if train in present:
            return [train, test] if test in present else [train]
    return ["x"] if "x" in present else []


def _without_labels(arrays: dict[str, NDArray[Any]], path: Path, window: Window | None) -> Splits:
    pixels = to_uint8({f"{printable(key)} in {printable(path)}": array for key, array in arrays.items()}, window)
    train, *rest = (unlabelled(channels_first(array, name)) for name, array in pixels.items())
    test = rest[0] if rest else unlabelled(train.images[:0])
    return Splits(train, test, ())


def _is_multi_label(array: NDArray[Any]) -> bool:
    """Whether labels are 0 or 1 in more than one column: [n, labels]."""
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "iub" or array.size == 0:
        return False
    return bool(array.min() >= 0 and array.max() <= 1)


def _with_several_labels(
    keys: list[tuple[str, str]], arrays: dict[str, NDArray[Any]], path: Path, window: Window | None
) -> Splits:
    """Images with several yes-or-no labels each, as ChestMNIST has them. Their validation split is not used."""
    keys = keys[:2]
    shapes = [arrays[label_key].shape for _, label_key in keys]
    for (image_key, label_key), shape in zip(keys, shapes, strict=True):
        if len(np.atleast_1d(arrays[image_key])) != shape[0] or shape[1] != shapes[0][1]:
            raise UserError(
                f"{printable(path)}: {label_key} has shape {list(shape)}; expected a line for each image of "
                f"{image_key} and {shapes[0][1]} labels, as {keys[0][1]} has"
            )
    pixels = to_uint8({f"{key} in {printable(path)}": arrays[key] for key, _ in keys}, window)
    images = [channels_first(array, name) for name, array in pixels.items()]
    targets = [torch.from_numpy(arrays[label_key].astype(np.uint8)) for _, label_key in keys]
    return Splits(unlabelled(images[0], targets[0]), unlabelled(images[1], targets[1]), ())


def _split_keys(names: list[str], path: Path) -> list[tuple[str, str]]:
    """The names of images and labels in a file: training, test and, if there is one, validation."""
    present = set(names)
    keys = next((keys for keys in _TRAIN_AND_TEST_KEYS if present.issuperset(keys)), None)
    if keys is None:
        accepted = " or ".join(", ".join(keys) for keys in _TRAIN_AND_TEST_KEYS)
        raise UserError(
            f"{printable(path)} has the arrays {listed(names)}; expected {accepted}, or images alone (x_train, "
            "train_images or x), which are then without labels"
        )
    validation = [pair for pair in _VALIDATION_KEYS if present.issuperset(pair)][:1]
    return [(keys[0], keys[1]), (keys[2], keys[3]), *validation]


def _to_labels(array: NDArray[Any], name: str) -> Tensor:
    """Convert integers from 0, [n] or [n, 1], to int64 [n]."""
    if array.dtype.kind not in "iub":
        raise UserError(f"{name} has type {array.dtype}; labels must be integers from 0")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(f"{name} has shape {list(array.shape)}; expected [n] or [n, 1], one class an image")
    if len(array) == 0:
        raise UserError(f"{name} is empty; at least one label is needed")
    if array.min() < 0:
        raise UserError(f"{name} has {int((array < 0).sum())} negative labels; labels must be 0, 1, 2, ...")
    if array.max() >= _MOST_CLASSES:
        raise UserError(f"{name} has the label {array.max()}; renumber the classes 0, 1, 2, ...")
    return torch.from_numpy(array.astype(np.int64))


def _class_names(names: NDArray[Any] | None, classes: int, path: Path) -> tuple[str, ...]:
    if names is None:
        return tuple(str(index) for index in range(classes))
    if names.ndim != 1 or len(names) < classes:
        raise UserError(
            f"{printable(path)}: class_names has shape {list(names.shape)} but the labels reach {classes - 1}; "
            f"expected at least {classes} names (or leave class_names out)"
        )
    texts = (name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names.tolist())
    return tuple(map(printable, texts))
