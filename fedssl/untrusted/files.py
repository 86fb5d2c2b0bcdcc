"""Reading files and paths that a user, a recipe or a received folder names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import UserError


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. A named pipe or a device is refused at once; reading it could wait for ever.

    Args:
        path: the file, or a link to it.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a folder, a pipe or a device", str(path))
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_regular_file(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a regular file; see `open_regular_file`.

    Args:
        path: the file, or a link to it.
        most_bytes: the largest size that is read; by default any.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is too large.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            problem = f"expected at most {most_bytes:,} bytes, the file has {size:,}"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read()


def expand_home(path: str | Path) -> Path:
    """A path with `~` or `~user` replaced by that home folder.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{str(path)!r} begins with an unknown user's home folder; write the path in full") from None


def absolute_path(folder: Path, path: str | Path) -> Path:
    """A path as seen from a folder, absolute and without links; `~` is the home folder.

    Raises:
        UserError: there is no such user, or the links in the path form a circle.
    """
    try:
        return (folder / expand_home(path)).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{str(path)!r} cannot be resolved to a file: {error}") from error
