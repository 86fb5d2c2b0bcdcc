"""A table of image files: one line a file, with its label and anything else that is known of it."""

import csv
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .error_text import first_line, listed, printable
from .paths import kind_of


@dataclass(frozen=True)
class ImageTable:
    """A table's content.

    Attributes:
        path: the file it was read from.
        line_of: the number of a file's line (from 0) by the file's name as it stands in the table.
        columns: the values of every line by the column's name, as text.
    """

    path: Path
    line_of: dict[str, int]
    columns: dict[str, list[str]]


def read_table(path: Path, file_column: str, label_column: str | None) -> ImageTable:
    """Read a CSV file with a header line (separated by tabs where its name ends with .tsv).

    Args:
        path: the table.
        file_column: the column that holds the files' names.
        label_column: the column that holds the labels; it must be there and have no empty value.

    Raises:
        UserError: the file cannot be read, lacks a column, or names a file twice.
    """
    shown = printable(path)
    if kind_of(path) != "file":
        raise UserError(f"there is no table {shown}; set data.labels to a CSV file, or to folders")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
            header, *lines = [line for line in csv.reader(file, delimiter=delimiter, strict=True) if line] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{shown} cannot be read as a table ({first_line(error)}); save it as CSV in UTF-8") from error
    for option, name in (("file_column", file_column), ("label_column", label_column)):
        if name is not None and name not in header:
            what = "" if option == "file_column" else ", or to null where the table has no labels"
            raise UserError(
                f"{shown} has the columns {listed(header)}, but not {printable(name)}; set data.{option}{what}"
            )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise UserError(f"{shown} has several columns named {listed(twice)}; rename them")
    wrong = next((number for number, line in enumerate(lines, 2) if len(line) != len(header)), None)
    if wrong is not None:
        raise UserError(
            f"{shown}: line {wrong} has {len(lines[wrong - 2])} values, but the header has {len(header)}; "
            "correct that line"
        )
    columns = {name: [line[position] for line in lines] for position, name in enumerate(header)}
    if label_column is not None and "" in columns[label_column]:
        number = columns[label_column].index("") + 2
        raise UserError(f"{shown}: line {number} has no {printable(label_column)}; fill it in, or remove the line")
    files = [Path(name).as_posix() for name in columns[file_column]]
    line_of = {name: number for number, name in enumerate(files)}
    if len(line_of) < len(files):
        again = sorted({name for name in files if files.count(name) > 1}) if len(files) < 10_000 else []
        which = f": {listed(again)}" if again else ""
        count = len(files) - len(line_of)
        raise UserError(f"{shown} has {count} files on more than one line{which}; keep one line each")
    return ImageTable(path, line_of, columns)
