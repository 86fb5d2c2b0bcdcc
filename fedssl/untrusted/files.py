"""Reading files and paths that a user, a recipe or a received folder names."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import UserError


def read_regular_file(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a regular file. A named pipe or a device is refused at once; reading it could wait for ever.

    Args:
        path: the file, or a link to it.
        most_bytes: the largest size that is read; by default any.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is too large.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a folder, a pipe or a device", str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            problem = f"expected at most {most_bytes:,} bytes, the file has {status.st_size:,}"
            raise OSError(errno.EFBIG, problem, str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


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
