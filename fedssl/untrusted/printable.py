"""Text of unknown origin made harmless for a terminal, a log, a CSV file, a page and a chart."""

from __future__ import annotations

import re

#: names of recipes, rows and scenarios: one line of 1 to 200 characters; a control character could move a cursor, end
#: a line of a file or hide text. The C1 controls, line separators and marks that reverse the direction of text count.
NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]{1,200}$"
#: descriptions: the same characters, and line breaks and tabs
TEXT_PATTERN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$"

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    r"""The text with control characters and undecodable bytes as escapes: a newline as `\n`, ESC as `\x1b`.

    Args:
        text: any text.
        keep: characters that stay as they are, such as `"\n"` where several lines are printed.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keep else character.encode("unicode_escape").decode("ascii")

    return _CONTROLS.sub(escape, text)


def plot_text(text: str) -> str:
    """A text as matplotlib draws it literally: a dollar sign begins no formula. Line breaks stay."""
    return printable(text, keep="\n").replace("$", r"\$")
