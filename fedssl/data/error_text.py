"""Short pieces of error messages, so that each message stays one line."""

from collections.abc import Sequence

_MOST_NAMES = 10
_MOST_CHARACTERS = 160


def listed(names: Sequence[str]) -> str:
    """The first ten names, separated by commas, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES]) if names else "(none)"
    return f"{shown}, and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 160 characters; the error's type where the message is empty."""
    lines = str(error).splitlines()
    return lines[0][:_MOST_CHARACTERS] if lines else type(error).__name__
