"""Images whose rows are read only when they are asked for, from a file or from memory; and how much memory there is."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import UserError
from ..untrusted import printable


class _Rows:
    """Some rows of uint8 images [n, C, H, W], used as a tensor of them: `images[rows]`, `len`, `split`, `shape`."""

    dtype = torch.uint8
    device = torch.device("cpu")

    def __init__(self, image_shape: tuple[int, ...], rows: Tensor):
        self._image_shape, self._rows = image_shape, rows

    @property
    def shape(self) -> torch.Size:
        """Return [n, C, H, W]."""
        return torch.Size((len(self._rows), *self._image_shape))

    @property
    def nbytes(self) -> int:
        """Return the bytes that all images take in memory."""
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Tensor | slice | int) -> Tensor:
        """Read images: uint8 [m, C, H, W] by row numbers or a slice, [C, H, W] by one row number."""
        raise NotImplementedError

    def split(self, count: int) -> Iterator[Tensor]:
        """Read all images, `count` at a time."""
        for start in range(0, len(self), count):
            yield self[start : start + count]


class StoredImages(_Rows):
    """Images of a file, see `open_stored_images`.

    Rows are read, not mapped: a limit on the address space holds, and a batch takes no more memory than itself. The
    file stays open, so that a run goes on if it is deleted. Reading raises a UserError if the file cannot be read.
    """

    def __init__(self, file: _OpenFile, image_shape: tuple[int, ...], rows: Tensor):
        super().__init__(image_shape, rows)
        self._file = file

    def __getitem__(self, index: Tensor | slice | int) -> Tensor:
        rows = self._rows[index]
        images = torch.empty((rows.numel(), *self._image_shape), dtype=torch.uint8)
        for image, row in zip(images.numpy(), rows.reshape(-1).tolist(), strict=True):
            self._file.read_into(memoryview(image).cast("B"), row * image.size)
        return images if rows.ndim else images[0]

    def of_rows(self, index: Tensor | slice) -> StoredImages:
        """Return the images of some rows, which are not read yet."""
        return StoredImages(self._file, self._image_shape, self._rows[index])


class ChosenImages(_Rows):
    """Some rows of images in memory [m, C, H, W], copied when asked for: a client of one step need not copy all."""

    def __init__(self, images: Tensor, rows: Tensor):
        super().__init__(images.shape[1:], rows)
        self._images = images

    def __getitem__(self, index: Tensor | slice | int) -> Tensor:
        rows = self._rows[index]
        # of a batch of 50 small images, index_select takes a tenth of the time of indexing
        return self._images.index_select(0, rows) if rows.ndim else self._images[rows]


#: images [n, C, H, W] in memory or in a file
Images: TypeAlias = Tensor | StoredImages | ChosenImages


def rows_in_place(images: Images, rows: Tensor) -> Images:
    """Return some of the images, none of which is read or copied yet."""
    return ChosenImages(images, rows) if isinstance(images, Tensor) else images_of_rows(images, rows)


def images_of_rows(images: Images, index: Tensor | slice) -> Images:
    """Return some of the images; those in a file stay there."""
    return images.of_rows(index) if isinstance(images, StoredImages) else images[index]


def open_stored_images(path: Path, image_shape: tuple[int, int, int], count: int) -> StoredImages:
    """Return the `count` images [C, H, W] of a file that holds nothing but their bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{printable(path)} cannot be opened: {error.strerror or error}") from error
    return StoredImages(_OpenFile(path, handle), image_shape, torch.arange(count))


class _OpenFile:
    """A file that stays open as long as anybody reads it, also processes that are forked or get it when they start."""

    def __init__(self, path: Path, handle: int):
        self._path, self._handle = path, handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _file_of_handle, (self._path, DupFd(self._handle))

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._handle, [target[done:]], offset + done)
            except OSError as error:
                raise UserError(f"{printable(self._path)} cannot be read: {error.strerror or error}") from error
            if count == 0:
                raise UserError(f"{printable(self._path)} has become shorter; delete it, so that it is written again")
            done += count

    def __del__(self) -> None:
        os.close(self._handle)


def _file_of_handle(path: Path, handle: Any) -> _OpenFile:
    return _OpenFile(path, handle.detach())


def readable_bytes(count: int) -> str:
    """Return a number of bytes in GB, or in MB below one GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def available_memory() -> int:
    """Return the bytes that can still be allocated: the least of what machine, control group and `ulimit -v` leave."""
    # Not by psutil, which knows neither of the last two.
    page = os.sysconf("SC_PAGE_SIZE")
    limits = [os.sysconf("SC_PHYS_PAGES") * page]
    with suppress(OSError, KeyError):  # no Linux: what is installed
        fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        limits.append(soft_limit)
        with suppress(OSError):
            limits.append(soft_limit - int(_text("/proc/self/statm").split()[0]) * page)
    with suppress(OSError, ValueError, KeyError):  # no control group, or `max` for no limit
        limit, used = (int(_text(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        statistics = dict(line.split() for line in _text("/sys/fs/cgroup/memory.stat").splitlines())
        limits.append(limit - used + int(statistics["inactive_file"]))  # cached files can be dropped
    return max(0, min(limits))


def _text(path: str) -> str:
    return Path(path).read_text(encoding="ascii")
