"""Datasets in .npz files, whose arrays are checked before they are read."""

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from rich.filesize import decimal as readable_bytes
from torch import Tensor

from ..errors import UserError, explained
from ..untrusted import expand_home, printable
from .files import first_bytes, kind_of, listed, notify, remedy
from .options import DataOptions
from .pixels import (
    VALUES_FOR_WINDOW,
    Window,
    channel_axis,
    channels_first,
    is_deep,
    notify_of_copies,
    require_pixels,
    to_uint8,
    window_of_percentiles,
)
from .stored_images import LabelledImages, Splits, available_memory, unlabelled

_SHARE_OF_MEMORY = 0.5  # the clients' shares are copies
_LONGEST_HEADER = 10_000  # bytes, as numpy limits it
_MOST_CLASSES = 65536
_TRAIN_AND_TEST_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_VALIDATION_KEYS = (("x_val", "y_val"), ("val_images", "val_labels"))


def load_npz(options: DataOptions) -> Splits:
    """Read the training, test and, if there is one, validation split of the .npz file `options.path`.

    A file without any labels is a dataset without labels; then the test images may be missing. Labels [n, labels] of 0
    and 1 are several labels an image: they are used in evaluation alone.
    """
    assert options.path is not None
    path = expand_home(options.path)
    with NpzArchive(path) as archive:
        unlabelled_keys = _unlabelled_keys(archive.names)
        if unlabelled_keys:
            _tell_of_unread(archive.names, unlabelled_keys, path)
            tensors, window = _images(archive.read(unlabelled_keys), path, options)
            first, second = tensors[0], tensors[1] if len(tensors) > 1 else tensors[0][:0]
            return Splits(unlabelled(first), unlabelled(second), (), window=window)
        keys = _split_keys(archive.names, path)
        names = [*(key for pair in keys for key in pair), *{"class_names"}.intersection(archive.names)]
        _tell_of_unread(archive.names, names, path)
        arrays = archive.read(names)

    several = all(_is_multi_label(arrays[label_key]) for _, label_key in keys)
    keys = keys[:2] if several else keys
    labels = []
    for image_key, label_key in keys:
        images, label_array, name = arrays[image_key], arrays[label_key], f"{label_key} in {printable(path)}"
        labels.append(torch.from_numpy(label_array.astype(np.uint8)) if several else _to_labels(label_array, name))
        if images.ndim and len(images) != len(label_array):
            raise UserError(
                f"{printable(path)}: {image_key} has {len(images)} images but {label_key} has {len(label_array)} "
                "labels; they must match"
            )
        if several and label_array.shape[1] != labels[0].shape[1]:
            most = f"{keys[0][1]} has {labels[0].shape[1]}"
            raise UserError(
                f"{name} has {label_array.shape[1]} columns but {most}; expected one for each label in both"
            )
    tensors, window = _images({key: arrays[key] for key, _ in keys}, path, options)
    if several:
        train, test = map(unlabelled, tensors, labels)
        return Splits(train, test, (), window=window)
    train, test, *validation = (LabelledImages(*pair) for pair in zip(tensors, labels, strict=True))
    classes = 1 + int(max(label.max() for label in labels))
    class_names = _class_names(arrays.get("class_names"), classes, path)
    return Splits(train, test, class_names, validation[0] if validation else None, window)


def _images(arrays: dict[str, NDArray[Any]], path: Path, options: DataOptions) -> tuple[list[Tensor], Window | None]:
    """Return images [n, C, H, W] and the window; `percentiles` is measured on the first array."""
    named = {f"{printable(key)} in {printable(path)}": array for key, array in arrays.items()}
    window = options.window
    if window == "percentiles":
        window = _percentiles(*next(iter(named.items())), options.channels)
    pixels = to_uint8(named, window, options.channels)
    rows = [f"{key}/{row}" for key, array in arrays.items() for row in range(len(array))]
    notify_of_copies([hash(image.tobytes()) for array in pixels.values() for image in array], rows.__getitem__)
    return [channels_first(array, name, options.channels) for name, array in pixels.items()], window


def _tell_of_unread(names: Sequence[str], read: Sequence[str], path: Path) -> None:
    if unread := [name for name in names if name not in read]:
        notify(
            f"{printable(path)}: {listed(unread)} {'is' if len(unread) == 1 else 'are'} not read; read are "
            f"{listed(read)}, and labels where they are called {' or '.join(keys[1] for keys in _TRAIN_AND_TEST_KEYS)}"
        )


def _percentiles(name: str, images: NDArray[Any], channels: int | None) -> Window | None:
    """Return the window of percentiles of images [n, ...]; None without pixels of more than 8 bits."""
    require_pixels(name, images)
    if not is_deep(images):
        return None
    axis = 0 if images.ndim == 3 else channel_axis(images.shape, name, channels)
    by_channel = np.moveaxis(images, axis, 0) if axis and channels != 1 else images[None]  # colours become grey
    step = math.ceil(by_channel[0].size / VALUES_FOR_WINDOW)
    return window_of_percentiles(by_channel[:, ::step].reshape(len(by_channel), -1))


def images_in(
    path: Path, keys: Sequence[str], window: Window | None, channels: int | None, most: int | None = None
) -> dict[str, Tensor]:
    """Return the arrays of an .npz file that have one of these names, at most so many, or its only array, by name.

    They are uint8 [n, C, H, W], see `to_uint8`; `channels` is that of `channel_axis`.
    """
    with NpzArchive(path) as archive:
        names = [key for key in keys if key in archive.names][:most]
        names = names or (archive.names if len(archive.names) == 1 else [])
        if not names:
            raise UserError(
                f"{printable(path)} has the arrays {listed(archive.names)}; expected one of {', '.join(keys)}, or a "
                "single array"
            )
        arrays = archive.read(names)
    pixels = to_uint8({f"{printable(name)} in {printable(path)}": arrays[name] for name in names}, window, channels)
    named = zip(names, pixels.items(), strict=True)
    return {name: channels_first(array, text, channels) for name, (text, array) in named}


def _unlabelled_keys(names: list[str]) -> list[str]:
    """Return the names of the training and, if there are any, the test images in a file without labels; else none."""
    if any(label_key in names for keys in _TRAIN_AND_TEST_KEYS for label_key in keys[1::2]):
        return []
    image_keys = [*(keys[::2] for keys in _TRAIN_AND_TEST_KEYS), ("x",)]
    return next(([key for key in keys if key in names] for keys in image_keys if keys[0] in names), [])


def _split_keys(names: list[str], path: Path) -> list[tuple[str, str]]:
    """Return the names of images and labels in a file: training, test and, if there is one, validation."""
    present = set(names)
    keys = next((keys for keys in _TRAIN_AND_TEST_KEYS if present.issuperset(keys)), None)
    if keys is None:
        accepted = " or ".join(", ".join(keys) for keys in _TRAIN_AND_TEST_KEYS)
        raise UserError(
            f"{printable(path)} has the arrays {listed(names)}; expected {accepted}, or images alone (x_train, "
            f"train_images or x), which are then without labels{'' if path.suffix == '.npz' else remedy([path])}"
        )
    validation = [pair for pair in _VALIDATION_KEYS if present.issuperset(pair)][:1]
    return [(keys[0], keys[1]), (keys[2], keys[3]), *validation]


def _is_multi_label(array: NDArray[Any]) -> bool:
    """Return True if labels are 0 or 1 in more than one column: [n, labels]."""
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "iub" or array.size == 0:
        return False
    return bool(array.min() >= 0 and array.max() <= 1)


def _to_labels(array: NDArray[Any], name: str) -> Tensor:
    """Convert integers from 0, [n] or [n, 1], to int64 [n]."""
    if array.dtype.kind not in "iub":
        missing = int(np.isnan(array).sum()) if array.dtype.kind == "f" else 0
        how = "numpy.unique(labels, return_inverse=True)[1]" if array.dtype.kind in "US" else ".astype(int)"
        raise UserError(
            f"{name} has type {array.dtype}{f' and {missing} labels that are NaN' if missing else ''}; labels must be "
            f"integers from 0: leave out images without a label, and save the others' labels by {how}"
        )
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


class NpzArchive(ExitStack):
    """An .npz file as a context manager, and its arrays' `names`; nothing is ever unpickled, as that can run code.

    An .npy file is read as an archive of one array, `x`.
    """

    def __init__(self, path: Path):
        """Open the file, or raise a UserError where it cannot be read or is no .npz file."""
        super().__init__()
        self._shown = shown = printable(path)
        kind = kind_of(path)
        if kind == "missing":
            raise UserError(f"there is no file {shown}; set data.path=FILE.npz to one that exists")
        if kind == "folder":
            raise UserError(f"{shown} is a folder, not an .npz file; set data.path to a file, or data.name=images")
        if kind == "special":
            raise UserError(f"{shown} is a pipe or a device, not an .npz file; copy the data into a file")
        #: of each array its number of bytes, header and all, and what opens it
        self._members: dict[str, tuple[int, Callable[[], IO[bytes]]]]
        if first_bytes(path, len(npy_format.MAGIC_PREFIX)) == npy_format.MAGIC_PREFIX:
            self._members = {"x": (path.stat().st_size, lambda: path.open("rb"))}
        else:
            advice = remedy([path]) or "; write it with numpy.savez_compressed, and check its permissions"
            with explained(f"{shown} cannot be read as an .npz file", advice):
                archive = self.enter_context(zipfile.ZipFile(path))
            self._members = {
                member.filename.removesuffix(".npy"): (member.file_size, partial(archive.open, member))
                for member in archive.infolist()
            }
        self.names = [*self._members]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array, from its header alone."""
        return self._header(name)[0]

    def read(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Read arrays by name; a UserError names one that is corrupt, holds Python objects or is too large."""
        sizes = {name: self._checked_size(name) for name in names}
        total, available = sum(sizes.values()), available_memory()
        if total > _SHARE_OF_MEMORY * available:
            largest = max(sizes, key=lambda name: sizes[name])
            raise UserError(
                f"{self._shown}: the arrays take {readable_bytes(total)} of memory ({printable(largest)} "
                f"alone {readable_bytes(sizes[largest])}), but only {readable_bytes(available)} are available; store "
                "fewer or smaller images, or each image as a file of its own"
            )
        arrays = {}
        for name in names:
            with self._opened(name) as file:
                arrays[name] = npy_format.read_array(file, allow_pickle=False)
        return arrays

    def _checked_size(self, name: str) -> int:
        """Return the bytes of an array, from its header; they must be what the archive's directory says."""
        shape, dtype, content = self._header(name)
        if dtype.hasobject:
            raise UserError(
                f"{self._shown}: {printable(name)} is an object array, which is never read; save it as numbers (or "
                "strings)"
            )
        size = math.prod(shape) * dtype.itemsize
        if size != content:
            shown = f"{size:,}" if size < 10**18 else f"10^{len(str(size)) - 1}"
            raise UserError(
                f"{self._shown}: {printable(name)} is corrupt: its header announces {shown} bytes, but the "
                f"file holds {content:,}; copy or write the file again"
            )
        return size

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
        """Read an array's shape and type, and the number of bytes after its header."""
        with self._opened(name) as file:
            first = npy_format.read_magic(file) == (1, 0)
            # Version 3 differs from 2 in the names of the fields of structured types, which no image has.
            read = npy_format.read_array_header_1_0 if first else npy_format.read_array_header_2_0
            shape, _, dtype = read(file, _LONGEST_HEADER)
            if any(size < 0 for size in shape):
                raise ValueError(f"invalid shape {shape}")
            return shape, dtype, self._members[name][0] - file.tell()

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        """Open an array's bytes; whatever fails while they are read is told as damage."""
        damage = f"{self._shown}: {printable(name)} is corrupt"
        with explained(damage, "; copy or write the file again"), self._members[name][1]() as file:
            yield file
