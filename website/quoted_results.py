"""The figures of the pages, and the command that writes those that come from the tables in benchmarks/results.

`quoted_results.yaml` lists the figures of a page in their order, and where they come from:

    docs/demo.md:
    - 89.9 ± 0.1; 92.5 ± 0.5 = digits_demo | knn; linear | Hetero-SSFL
    - 0.5 = mu

Behind the first two stand a folder in benchmarks/results, columns, and rows: each row's figure in each column, in turn.
What stands behind the third says only what it is. A column is

- of a table of training, `knn` or another metric, with the scenario in brackets where there are several: the mean over
  the seeds in `table.csv`, and its sample standard deviation where the page has `±`
- of a table of resources, `memory`, `flops` or `traffic`, or one of these and `ratio`
- either of them after `paper's`: what the paper prints
- of the operators' times, `info_nce, to the best peer`; a row is a size
- of the loops' times, `fedssl, images/s` or `times lightly`; a row is a training
- of the rounds' times, `overhead, %` or `overhead, ms`; a row is a simulation, or a number of clients

`A - B` is the difference of two rows, and `best control` the control with the highest figure. A figure keeps the number
of its decimals. A test fails where a page or the list has another figure than its table, and `python -m
website.quoted_results` writes the table's into both.
"""

import difflib
import re
from pathlib import Path

import yaml

from website import result_tables
from website.repository_files import ROOT
from website.result_tables import RESULTS

LIST = Path(__file__).with_suffix(".yaml")
#: a number with decimals and its spread, or a rate
_FIGURE = re.compile(r"(?<![\w.,])(?:-?\d+\.\d+(?: ± \d+\.\d+)?(?!\d|\.\d)|[\d,]+(?= images/s))")
#: no figures are looked for in code, equations and the operators' table, which has a test of its own
_CODE = re.compile(
    r"<!-- benchmarks -->.*?<!-- /benchmarks -->|^```.*?^```$|`[^`\n]*`|^    .*?$|\$\$.*?\$\$|\$[^$\n]*\$",
    re.DOTALL | re.MULTILINE,
)


def listed() -> dict[str, list[str]]:
    """The lines of the list by page."""
    return yaml.safe_load(LIST.read_text(encoding="utf-8"))


def figures(markdown: str) -> list[re.Match[str]]:
    """The figures of a page."""
    return list(_FIGURE.finditer(_CODE.sub(lambda code: " " * len(code[0]), markdown)))


def renewed(page: str, markdown: str, lines: list[str]) -> tuple[str, list[str]]:
    """A page and its lines of the list with the figures that the tables have now.

    Raises:
        ValueError: the page has other figures than its lines, or a line names what no table has.
    """
    found, before = figures(markdown), _figures_of(lines)
    if (shown := [match[0] for match in found]) != before:
        different = [line for line in difflib.ndiff(before, shown, charjunk=None) if line[0] in "+-"]
        raise ValueError(f"{page} has (+) and {LIST.name} lists (-) other figures: {', '.join(different)}")
    lines = [_renewed(line) for line in lines]
    for match, figure in reversed(list(zip(found, _figures_of(lines), strict=True))):
        markdown = markdown[: match.start()] + figure + markdown[match.end() :]
    return markdown, lines


def _figures_of(lines: list[str]) -> list[str]:
    return [figure for line in lines for figure in line.partition(" = ")[0].split("; ")]


def _renewed(line: str) -> str:
    before, _, source = line.partition(" = ")
    if " | " not in source:
        return line
    folder, columns, rows = source.split(" | ")
    places = [(column, row) for row in rows.split("; ") for column in columns.split("; ")]
    if len(places) != before.count("; ") + 1:
        raise ValueError(f"{line!r} has other than {len(places)} figures, one for each row and column")
    like = zip(places, before.split("; "), strict=True)
    return "; ".join(_text(folder, *place, figure) for place, figure in like) + f" = {source}"


def _text(folder: str, column: str, row: str, like: str) -> str:
    """The figure of a row, or of the difference of two, with the decimals and the spread of another text."""
    decimals = [len(number.partition(".")[2]) for number in like.split(" ± ")]
    values, *others = (_values(folder, column, name) for name in row.split(" - "))
    if others:
        values = [values[0] - others[0][0]]
    if len(decimals) > len(values):
        raise ValueError(f"{folder} has no spread of {row} in the column {column}")
    return " ± ".join(f"{value:,.{places}f}" for value, places in zip(values, decimals, strict=False))


def _values(folder: str, column: str, row: str) -> list[float]:
    """A figure of a table, and its spread where there is one."""
    table = result_tables.read(RESULTS / folder)
    if column not in table:
        raise ValueError(f"{folder} has no column {column!r}; it has {'; '.join(table)}")
    of_rows = table[column]
    if row == "best control":
        row = max(result_tables.controls(RESULTS / folder), key=lambda control: of_rows[control])
    if row not in of_rows:
        raise ValueError(f"{folder} has no row {row!r} in the column {column}; it has {'; '.join(of_rows)}")
    return of_rows[row]


def main() -> None:
    """Write the tables' figures into the pages and the list; where one page is refused, into none."""
    pages = {page: renewed(page, (ROOT / page).read_text(encoding="utf-8"), lines) for page, lines in listed().items()}
    for page, (markdown, _) in pages.items():
        (ROOT / page).write_text(markdown, encoding="utf-8")
    lists = {page: lines for page, (_, lines) in pages.items()}
    LIST.write_text(yaml.safe_dump(lists, allow_unicode=True, sort_keys=False, width=1000), encoding="utf-8")


if __name__ == "__main__":
    main()
