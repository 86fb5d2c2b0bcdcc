"""Rows of text as a table in Markdown, and as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table. A bar in a cell is escaped, and white space is folded.

    Args:
        header: the columns' titles.
        rows: the cells; each row is as long as the header.
        text_columns: how many columns, from the left, hold text; the others are aligned to the right.
    """
    rule = "|" + "---|" * text_columns + "---:|" * (len(header) - text_columns)
    return "\n".join([_markdown_line(header), rule, *map(_markdown_line, rows)])


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in columns: the first one is aligned to the left, the others to the right; a rule below the header."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for cells in (header, *rows):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        lines.append("  ".join(padded).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
