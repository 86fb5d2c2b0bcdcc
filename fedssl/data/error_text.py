"""Short pieces of messages, so that each message stays one line."""

from collections.abc import Sequence
from pathlib import Path

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
