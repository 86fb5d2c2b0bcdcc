"""What a path that the user gave leads to, without a traceback for any path."""

import os
import stat
from pathlib import Path
from typing import Literal

from ..errors import UserError
from .error_text import first_line, printable


def expanded(path: Path, option: str) -> Path:
    """The path with `~` replaced by the home folder; `option` is the name that an error message begins with.

    Raises:
        UserError: there is no such user, or the path cannot be one (a NUL byte).
    """
    if "\0" in str(path):
        raise UserError(f"{option}={printable(path)} contains a NUL byte, which no path may have; remove it")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{option}={printable(path)} cannot be expanded ({first_line(error)}); write the whole path"
        ) from error


def kind_of(path: Path) -> Literal["file", "folder", "missing", "special"]:
    """What is there; `special` is a pipe, a device or a socket, and opening it could wait for ever.

    Raises:
        UserError: the path may not be looked at, or is too long.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise UserError(f"{printable(path)} cannot be opened: {error.strerror or error}") from error
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "special"
