"""Figures that pages quote from the tables in benchmarks/results, and the command that writes them.

A comment behind figures names the source of each of them, in their order:

    FedBYOL has 42.4 and FedU 41.1<!-- = hetero_ssfl_tables_small: linear [non-IID]: FedBYOL; FedU -->.

That is the folder in benchmarks/results, a column, and rows. A column holds for the rows behind it, until another one
is named:

- of a table of training, `knn` or another metric, with the scenario in brackets where there are several: the mean over
  the seeds in `table.csv`, and its sample standard deviation where the page has `±`
- of a table of resources, `memory`, `flops` or `traffic`, or one of these and `ratio`
- either of them after `paper's`: what the paper prints
- of the operators' times, `info_nce, to the best peer`; a row is a size
- of the loops' times, `fedssl, images/s` or `times lightly`; a row is a training
- of the rounds' times, `overhead, %` or `overhead, ms`; a row is a simulation, or a number of clients

`A - B` is the difference of two rows, and `best control` the control with the highest figure. A figure keeps the number
of its decimals. The site's build inserts the tables' figures, a test fails where a page has another one, and
`python -m website.quoted_results` writes them into the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from website import result_tables
from website.repository_files import ROOT
from website.result_tables import RESULTS

#: a number with decimals and its spread, or a rate
FIGURE = re.compile(r"(?<![\w.,])(?:-?\d+\.\d+(?: ± \d+\.\d+)?(?!\d|\.\d)|[\d,]+(?= images/s))")
MARK = re.compile(r"<!-- =(.*?)-->", re.DOTALL)
BEST_CONTROL = "best control"


def pages() -> list[Path]:
    """The pages that may quote results: those of docs/, and what stands beside the results themselves."""
    return sorted([*(ROOT / "docs").rglob("*.md"), *RESULTS.rglob("README.md")])


def fill(markdown: str) -> str:
    """Put the tables' figures in place of those that stand before each mark.

    Raises:
        ValueError: a mark names what no table has, or more figures than stand before it.
    """
    parts, end = [], 0
    for mark in MARK.finditer(markdown):
        parts += [_filled(markdown[end : mark.start()], mark), mark[0]]
        end = mark.end()
    return "".join([*parts, markdown[end:]])


def without_marks(markdown: str) -> str:
    """Take the marks out."""
    return MARK.sub("", markdown)


def unmarked(markdown: str) -> list[str]:
    """List the figures that no mark names, in their order."""
    parts, end = [], 0
    for mark in MARK.finditer(markdown):
        before = markdown[end : mark.start()]
        parts.append(before[: _figures_before(before, mark)[0].start()])
        end = mark.end()
    return FIGURE.findall(" ".join([*parts, markdown[end:]]))


def _filled(before: str, mark: re.Match[str]) -> str:
    figures = _figures_before(before, mark)
    for figure, source in reversed(list(zip(figures, _sources(mark), strict=True))):
        before = before[: figure.start()] + _text(*source, like=figure[0]) + before[figure.end() :]
    return before


def _figures_before(before: str, mark: re.Match[str]) -> list[re.Match[str]]:
    """Return the figures that a mark names: the last ones of its paragraph, or of its row of a table."""
    row = before.rfind("\n") + 1
    start = row if before[row:].startswith("|") else before.rfind("\n\n") + 1
    figures, count = list(FIGURE.finditer(before, start)), len(_sources(mark))
    if len(figures) < count:
        raise ValueError(f"{mark[0]} names {count} figures, but only {len(figures)} with decimals stand before it")
    return figures[-count:]


def _sources(mark: re.Match[str]) -> list[tuple[str, str, str]]:
    """Return the folder, the column and the row or difference of rows of each figure that a mark names."""
    folder, _, rest = " ".join(mark[1].split()).partition(": ")
    sources, column = [], ""
    for source in rest.split("; "):
        named, colon, row = source.rpartition(": ")
        column = named if colon else column
        sources.append((folder, column, row))
    return sources


def _text(folder: str, column: str, row: str, like: str) -> str:
    """Return the figure of a row, or of the difference of two, with the decimals and the spread of another text."""
    decimals = [len(number.partition(".")[2]) for number in like.split(" ± ")]
    values = [_values(folder, column, name) for name in row.split(" - ")]
    if len(values) == 2:
        values = [[values[0][0] - values[1][0]]]
    if len(decimals) > len(values[0]):
        raise ValueError(f"{folder} has no spread of {row} in the column {column}")
    return " ± ".join(f"{value:,.{places}f}" for value, places in zip(values[0], decimals, strict=False))


def _values(folder: str, column: str, row: str) -> list[float]:
    """Return a figure of a table, and its spread where there is one."""
    table = result_tables.read(RESULTS / folder)
    if column not in table:
        raise ValueError(f"{folder} has no column {column!r}; it has {'; '.join(table)}")
    figures = table[column]
    if row == BEST_CONTROL:
        row = max(result_tables.controls(RESULTS / folder), key=lambda control: figures[control])
    if row not in figures:
        raise ValueError(f"{folder} has no row {row!r} in the column {column}; it has {'; '.join(figures)}")
    return figures[row]


def main() -> None:
    """Write the tables' figures into the pages."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            path.write_text(filled, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
