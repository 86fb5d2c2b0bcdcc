"""Arrays of an .npz file, checked before they are read: a small file may announce more than the memory holds."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from ..errors import UserError
from .error_text import first_line, printable
from .memory import available_memory, readable_bytes
from .paths import kind_of

_SUFFIX = ".npy"
_SHARE_OF_MEMORY = 0.5  # the clients' shares are copies
_LONGEST_HEADER = 10_000  # bytes, as numpy limits it


class NpzArchive:
    """An .npz file as a context manager; nothing in it is ever unpickled, since that can run code.

    Attributes:
        names: the arrays' names.
    """

    def __init__(self, path: Path):
        """Open the file.

        Raises:
            UserError: there is no such file, it cannot be read, or it is no .npz file.
        """
        self._path = path
        kind = kind_of(path)
        if kind == "missing":
            raise UserError(f"there is no file {printable(path)}; set data.path=FILE.npz to one that exists")
        if kind == "folder":
            raise UserError(
                f"{printable(path)} is a folder, not an .npz file; set data.path to a file, or data.name=folder"
            )
        if kind == "special":
            raise UserError(f"{printable(path)} is a pipe or a device, not an .npz file; copy the data into a file")
        try:
            self._zip = zipfile.ZipFile(path)
        except PermissionError as error:
            raise UserError(f"{printable(path)} cannot be read ({error.strerror}); check its permissions") from error
        except Exception as error:  # a damaged file makes zipfile raise errors of many types
            what = "is a single array, not" if _begins_as_npy(path) else "cannot be read as"
            raise UserError(f"{printable(path)} {what} an .npz file; write it with numpy.savez_compressed") from error
        self.names = [name.removesuffix(_SUFFIX) for name in self._zip.namelist()]

    def __enter__(self) -> "NpzArchive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._zip.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, from its header alone.

        Raises:
            UserError: there is no such array, or it is corrupt.
        """
        try:
            with self._zip.open(self._member(name)) as file:
                return _read_header(file)[0]
        except Exception as error:
            raise self._corrupt(name, error) from error

    def read(self, names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Read arrays by name.

        Raises:
            UserError: an array is corrupt or holds Python objects, or the arrays do not fit into the memory.
        """
        sizes = {name: self._checked_size(name) for name in names}
        total, available = sum(sizes.values()), available_memory()
        if total > _SHARE_OF_MEMORY * available:
            largest = max(sizes, key=lambda name: sizes[name])
            raise UserError(
                f"{printable(self._path)}: the arrays take {readable_bytes(total)} of memory ({printable(largest)} "
                f"alone {readable_bytes(sizes[largest])}), but only {readable_bytes(available)} are available; store "
                "fewer or smaller images, or each image as a file of its own"
            )
        return {name: self._read_one(name) for name in names}

    def _checked_size(self, name: str) -> int:
        """The bytes of an array, from its header; they must be what the archive's directory says."""
        try:
            member = self._member(name)
            with self._zip.open(member) as file:
                shape, dtype = _read_header(file)
                header = file.tell()
        except Exception as error:  # a damaged file makes zipfile, its decompressors and numpy raise many types
            raise self._corrupt(name, error) from error
        if dtype.hasobject:
            raise UserError(
                f"{printable(self._path)}: {printable(name)} is an object array, which is never read; save it as "
                "numbers (or strings)"
            )
        size = math.prod(shape) * dtype.itemsize
        if header + size != member.file_size:
            shown = f"{size:,}" if size < 10**18 else f"10^{len(str(size)) - 1}"
            raise UserError(
                f"{printable(self._path)}: {printable(name)} is corrupt: its header announces {shown} bytes, but the "
                f"file holds {member.file_size - header:,}; copy or write the file again"
            )
        return size

    def _read_one(self, name: str) -> NDArray[Any]:
        try:
            with self._zip.open(self._member(name)) as file:
                return npy_format.read_array(file, allow_pickle=False)
        except MemoryError as error:
            raise UserError(
                f"{printable(self._path)}: {printable(name)} does not fit into the memory; store fewer or smaller "
                "images"
            ) from error
        except Exception as error:
            raise self._corrupt(name, error) from error

    def _member(self, name: str) -> zipfile.ZipInfo:
        listed = self._zip.namelist()
        return self._zip.getinfo(name + _SUFFIX if name + _SUFFIX in listed else name)

    def _corrupt(self, name: str, error: Exception) -> UserError:
        reason = f"{printable(name)} is corrupt ({first_line(error)})"
        return UserError(f"{printable(self._path)}: {reason}; copy or write the file again")


def _read_header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of a .npy file that is open at its beginning; ValueError where they are invalid."""
    version = npy_format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = npy_format.read_array_header_1_0(file, _LONGEST_HEADER)
    elif version in ((2, 0), (3, 0)):
        # Version 3 differs in the names of the fields of structured types, which no image has.
        shape, _, dtype = npy_format.read_array_header_2_0(file, _LONGEST_HEADER)
    else:
        raise ValueError(f"unknown version {version} of the .npy format")
    if any(size < 0 for size in shape):
        raise ValueError(f"invalid shape {shape}")
    return shape, dtype


def _begins_as_npy(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(npy_format.MAGIC_PREFIX)) == npy_format.MAGIC_PREFIX
    except OSError:
        return False
