"""Datasets of image files in folders: with labels from the folders' names or from a table, or without labels."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..errors import UserError
from ..untrusted import printable
from .decoding import Decoding, decode_images, report_broken
from .files import expanded, first_line, kind_of, list_files, listed, notify, notify_of_left_out, subfolders
from .options import DataOptions
from .splits import LabelledImages, Splits
from .stored_images import images_of_rows


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


DEFAULT_IMAGE_SIZE = 32


@dataclass(frozen=True)
class _ImageFile:
    """One image file with what is known of it; `columns` are its values in the table, by column."""

    path: Path
    label: str | None = None
    columns: dict[str, str] = field(default_factory=dict)


def load_images(options: DataOptions) -> Splits:
    """Read a folder of images at `image_size` pixels a side.

    Where the folder holds train/ and test/, they are the splits. Otherwise all images are training images, but for a
    fixed, stratified `test_fraction` of them where there are labels.

    The images are gray where every file is gray, and RGB otherwise.

    Raises:
        UserError: a folder is missing or empty, files cannot be read, or the labels do not fit the files.
    """
    assert options.path is not None
    root = expanded(options.path, "data.path")
    if kind_of(root) != "folder":
        raise UserError(f"there is no folder {printable(root)}; set data.path to a folder of images")
    train, test = _listed_splits(root, options)
    class_names = _class_names(train, test, by_number=isinstance(options.labels, Path))
    if options.name == "images" and class_names and not test:
        train, test = _split_off_test(train, options.test_fraction)
    files = [*train, *test]
    size = options.image_size or DEFAULT_IMAGE_SIZE
    if options.name == "images" and options.image_size is None:
        notify(f"images are resized to {size} x {size} pixels; set data.image_size for another size")
    decoded = decode_images([file.path for file in files], Decoding.of(options, size))
    kept = [files[index] for index in decoded.kept]
    of_train = sum(index < len(train) for index in decoded.kept)
    if of_train == 0 or (test and of_train == len(kept)):
        name = "training" if of_train == 0 else "test"
        raise UserError(f"none of the {name} images in {printable(root)} can be read; repair or replace them")
    number_of = {name: number for number, name in enumerate(class_names)}
    labels = torch.tensor([number_of[file.label] if file.label is not None else 0 for file in kept])
    names = list(kept[0].columns)
    train_split, test_split = (
        LabelledImages(
            images_of_rows(decoded.images, part),
            labels[part],
            columns={name: tuple(file.columns[name] for file in kept[part]) for name in names},
        )
        for part in (slice(0, of_train), slice(of_train, None))
    )
    return Splits(train_split, test_split, tuple(map(printable, class_names)))


def _listed_splits(root: Path, options: DataOptions) -> tuple[list[_ImageFile], list[_ImageFile]]:
    """The training and test files; what is left out is named to the user."""
    table = None
    if isinstance(options.labels, Path):
        table = read_table(expanded(options.labels, "data.labels"), options.file_column, options.label_column)
    by_folder = options.name == "folder" or options.labels == "folders"
    split_folders = _split_folders(root, options)
    listing = list_files(root)
    left_out = [file for file in listing.others if table is None or not _same_file(file, table.path)]
    splits: list[list[_ImageFile]] = [[] for _ in split_folders]
    for path in listing.images:
        position = next((n for n, folder in enumerate(split_folders) if path.is_relative_to(folder)), None)
        file = None
        if position is not None:
            file = _described(path, root, split_folders[position], by_folder, table, options)
        if position is None or file is None:
            left_out.append(path)
        else:
            splits[position].append(file)
    expected = "in train/ or test/" if len(splits) > 1 else ""
    expected = "in the folder of its class" if by_folder else "on a line of the table" if table else expected
    notify_of_left_out(left_out, root, expected)
    if by_folder:
        for folder, files in zip(split_folders, splits, strict=True):
            files.sort(key=lambda file: file.label or "")  # a stable sort: a class's files keep their order
            _require_no_empty_class(folder, {file.label for file in files})
    if table is not None:
        _report_missing(table, root, splits, options)
    if not splits[0]:
        raise UserError(
            f"{printable(split_folders[0])} holds no image that can be used; set data.path to a folder of images"
        )
    return splits[0], splits[1] if len(splits) > 1 else []


def _split_folders(root: Path, options: DataOptions) -> list[Path]:
    """The folders train/ and test/ where both are there, and else the folder itself."""
    folders = [root / "train", root / "test"]
    missing = [folder for folder in folders if kind_of(folder) != "folder"]
    if missing and options.name == "folder":
        raise UserError(
            f"there is no folder {printable(missing[0])}; data.path must hold train/CLASS/ and test/CLASS/, or set "
            "data.name=images for any other folder of images"
        )
    return [root] if missing else folders


def _described(
    path: Path, root: Path, split: Path, by_folder: bool, table: ImageTable | None, options: DataOptions
) -> _ImageFile | None:
    """A file with its label; None where it lies in no class folder, or the table does not name it."""
    if by_folder:
        parts = path.relative_to(split).parts
        return _ImageFile(path, parts[0]) if len(parts) > 1 else None
    if table is None:
        return _ImageFile(path)
    line = table.line_of.get(path.relative_to(root).as_posix())
    if line is None:
        return None
    columns = {name: values[line] for name, values in table.columns.items()}
    return _ImageFile(path, None if options.label_column is None else columns[options.label_column], columns)


def _require_no_empty_class(folder: Path, labels: set[str | None]) -> None:
    empty = [inner.name for inner in subfolders(folder) if inner.name not in labels]
    if empty or not labels:
        what = f"; without an image: {listed(empty)}" if empty else ""
        raise UserError(f"{printable(folder)} needs one folder of images a class, none of them empty{what}")


def _report_missing(
    table: ImageTable, root: Path, splits: Sequence[Sequence[_ImageFile]], options: DataOptions
) -> None:
    """Treat files that the table names and that do not exist as broken ones."""
    present = {file.path.relative_to(root).as_posix() for files in splits for file in files}
    names = list(table.line_of)
    missing = {
        number: "not a file whose name ends as an image's" if (root / name).exists() else "there is no such file"
        for number, name in enumerate(names)
        if name not in present
    }
    report_broken([root / name for name in names], missing, options.broken)


def _class_names(train: Sequence[_ImageFile], test: Sequence[_ImageFile], by_number: bool) -> list[str]:
    """The classes in alphabetical order, or by their value where all are numbers; none without labels."""
    labels = {file.label for file in train if file.label is not None}
    unknown = {file.label for file in test if file.label is not None} - labels
    if unknown:
        raise UserError(f"test/ has classes that train/ lacks: {listed(sorted(unknown))}; make the folders match")
    if by_number and all(label.isdecimal() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _split_off_test(files: list[_ImageFile], fraction: float) -> tuple[list[_ImageFile], list[_ImageFile]]:
    """Training and test files: of each class the same fraction, the same for every seed, and at least one for training.

    Raises:
        UserError: no class has enough images for a test image.
    """
    labels = np.array([file.label for file in files])
    is_test = np.zeros(len(files), bool)
    generator = np.random.default_rng(0)
    for label in sorted(set(labels)):
        members = generator.permutation(np.flatnonzero(labels == label))
        is_test[members[: min(round(fraction * len(members)), len(members) - 1)]] = True
    if not is_test.any():
        raise UserError(
            f"data.test_fraction={fraction:g} leaves no test image of {len(files)} images; raise it, or add images"
        )
    return (
        [file for file, chosen in zip(files, is_test, strict=True) if not chosen],
        [file for file, chosen in zip(files, is_test, strict=True) if chosen],
    )


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
