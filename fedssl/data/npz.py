"""Datasets in .npz files."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError
from .error_text import first_line, listed
from .pixels import channels_first, to_uint8
from .splits import LabelledImages, Splits

_TRAIN_AND_TEST_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_VALIDATION_KEYS = (("x_val", "y_val"), ("val_images", "val_labels"))
_MOST_CLASSES = 65536


def load_npz(path: Path) -> Splits:
    """Read the training, test and, if there is one, validation split of an .npz file.

    Raises:
        UserError: the file is missing or unreadable, or its arrays do not fit together.
    """
    with open_npz(path) as archive:
        keys = _split_keys(archive.files, path)
        arrays = [(read_array(archive, path, images), read_array(archive, path, labels)) for images, labels in keys]
        names = read_array(archive, path, "class_names") if "class_names" in archive.files else None

    labels = []
    for (image_key, label_key), (image_array, label_array) in zip(keys, arrays, strict=True):
        labels.append(_to_labels(label_array, f"{label_key} in {path}"))
        if len(image_array) != len(label_array):
            raise UserError(
                f"{path}: {image_key} has {len(image_array)} images but {label_key} has {len(label_array)} labels; "
                "they must match"
            )
    pixels = to_uint8({f"{key} in {path}": images for (key, _), (images, _) in zip(keys, arrays, strict=True)})
    images = [channels_first(array, name) for name, array in pixels.items()]
    splits = [LabelledImages(*pair) for pair in zip(images, labels, strict=True)]
    classes = 1 + int(max(split.labels.max() for split in splits))
    return Splits(splits[0], splits[1], _class_names(names, classes, path), splits[2] if len(splits) > 2 else None)


def open_npz(path: Path) -> Any:
    """Open an .npz file without ever unpickling, as a context manager; `files` are the names of its arrays.

    Raises:
        UserError: there is no such file, it cannot be read, or it is no .npz file.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, not an .npz file; set data.path to a file, or data.name=folder")
    if not path.exists():
        raise UserError(f"there is no file {path}; set data.path=FILE.npz to one that exists")
    try:
        archive = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}); check its permissions and the disk") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as an .npz file; write it with numpy.savez_compressed") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UserError(f"{path} is a single array, not an .npz file; write it with numpy.savez_compressed")
    return archive


def read_array(archive: Any, path: Path, key: str) -> NDArray[Any]:
    """Read one array of an open .npz file; `path` is for error messages.

    Raises:
        UserError: the array is corrupt, or holds Python objects.
    """
    try:
        return np.asarray(archive[key])
    except (ValueError, OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy refuses to unpickle: an object array could run any code while it is read.
        if isinstance(error, ValueError) and "allow_pickle" in str(error):
            raise UserError(
                f"{path}: {key} is an object array, which is never read; save it as numbers (or strings)"
            ) from error
        raise UserError(f"{path}: {key} is corrupt ({first_line(error)}); copy or write the file again") from error


def _split_keys(names: list[str], path: Path) -> list[tuple[str, str]]:
    """The names of images and labels in a file: training, test and, if there is one, validation."""
    present = set(names)
    keys = next((keys for keys in _TRAIN_AND_TEST_KEYS if present.issuperset(keys)), None)
    if keys is None:
        accepted = " or ".join(", ".join(keys) for keys in _TRAIN_AND_TEST_KEYS)
        raise UserError(f"{path} has the arrays {listed(names)}; expected {accepted}")
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
            f"{path}: class_names has shape {list(names.shape)} but the labels reach {classes - 1}; "
            f"expected at least {classes} names (or leave class_names out)"
        )
    return tuple(name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names.tolist())
