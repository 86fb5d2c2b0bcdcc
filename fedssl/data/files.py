"""What a path that the user gave leads to, without a traceback for any path."""

import logging
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ..errors import UserError

_MOST_NAMES = 10


_MOST_CHARACTERS = 160


def listed(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """The first names, separated by commas, and how many more there are."""
    shown = ", ".join(map(printable, names[:most])) if names else "(none)"
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 160 characters; the error's type where the message is empty."""
    lines = str(error).splitlines()
    return printable(lines[0][:_MOST_CHARACTERS]) if lines else type(error).__name__


def printable(text: str | Path) -> str:
    r"""A name that fits on one line and can be stored as UTF-8.

    Control characters are escaped, and so are the bytes of a file name that are not UTF-8: `caf\xe9` becomes
    `caf\udce9`, as Python stands for such a byte by a lone surrogate.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


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


_LOGGER = logging.getLogger("fedssl.data")


_SECONDS_BETWEEN_LINES = 10.0


def notify(text: str) -> None:
    """Tell the user; the text is one line."""
    _LOGGER.warning("fedssl: %s", text)


class ProgressLines:
    """How far a long task is: a line on stderr every ten seconds, and none for a short task."""

    def __init__(self, task: str, total: int):
        self._task, self._total = task, total
        self._last = time.monotonic()

    def done(self, count: int) -> None:
        """So many of the task's items are done."""
        now = time.monotonic()
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(f"fedssl: {self._task}: {count:,} of {self._total:,}", file=sys.stderr, flush=True)
