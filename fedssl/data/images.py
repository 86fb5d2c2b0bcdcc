"""Datasets of image files in folders, with labels from the folders' names or from a table, or without labels."""

import csv
import io
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path

import numpy as np
import torch

from ..errors import UserError, explained
from ..untrusted import expand_home, printable
from .files import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    composed,
    kind_of,
    list_files,
    listed,
    notify,
    notify_of_left_out,
    notify_of_masks,
    remedy,
    split_folders,
    subfolders,
)
from .options import DataOptions
from .stored_images import (
    Images,
    LabelledImages,
    Splits,
    decode_images,
    images_of_rows,
    measured_window,
    report_broken,
)


@dataclass(frozen=True)
class _ImageFile:
    """One image file with what is known of it; `columns` are its values in the table, by column."""

    path: Path
    label: str | None = None
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ListedImages:
    """The training and test files of a folder of images, none of which is opened yet, and its classes."""

    train: list[_ImageFile]
    test: list[_ImageFile]
    class_names: list[str]

    def split(self, files: Sequence[_ImageFile], images: Images) -> LabelledImages:
        """Return some of the files' images with their labels and columns."""
        number_of = {name: number for number, name in enumerate(self.class_names)}
        numbers = [0 if file.label is None else number_of[file.label] for file in files]
        columns = {name: tuple(file.columns[name] for file in files) for name in self.train[0].columns}
        return LabelledImages(images, torch.tensor(numbers, dtype=torch.int64), columns=columns)


def listed_images(options: DataOptions) -> ListedImages:
    """List a folder of images, at least one for training; what is left out is named to the user.

    Where the folder holds train/ and test/, they are the splits. Otherwise all images are training images, but for a
    fixed, stratified `test_fraction` of them where there are labels. `more_paths` are further folders of images.
    """
    assert options.path is not None
    root = expand_home(options.path)
    train, test = _of_several_folders(options) if options.more_paths else _listed_splits(root, "data.path", options)
    class_names = _class_names(train, test, by_number=isinstance(options.labels, Path))
    if options.name == "images" and class_names and not test:
        train, test = _split_off_test(train, options.test_fraction)
    return ListedImages(train, test, class_names)


def load_images(options: DataOptions) -> Splits:
    """Read the images of `listed_images` at `image_size` pixels a side; their channels are those of `decode_images`."""
    listing = listed_images(options)
    files = [*listing.train, *listing.test]
    paths = [file.path for file in files]
    window = measured_window(paths, len(listing.train), options)
    options = options.model_copy(update={"window": window})
    size = options.image_size or 32
    if options.name == "images" and options.image_size is None:
        notify(f"images are resized to {size} x {size} pixels; set data.image_size for another size")
    images, indices = decode_images(paths, options, size, size)
    kept = [files[index] for index in indices]
    train_count = sum(index < len(listing.train) for index in indices)
    if train_count == 0 or (listing.test and train_count == len(kept)):
        name = "training" if train_count == 0 else "test"
        raise UserError(
            f"none of the {name} images in {printable(str(options.path))} can be read; repair or replace them"
        )
    train, test = (
        listing.split(kept[part], images_of_rows(images, part))
        for part in (slice(0, train_count), slice(train_count, None))
    )
    return Splits(train, test, tuple(map(printable, listing.class_names)), window=window)


def _of_several_folders(options: DataOptions) -> tuple[list[_ImageFile], list[_ImageFile]]:
    """Return the training files of all folders, each with its folder, as it was given, in the column `folder`."""
    assert options.path is not None
    files: list[_ImageFile] = []
    places = Counter[str]()
    for path in (options.path, *options.more_paths):
        folder = expand_home(path)
        train, test = _listed_splits(folder, "data.more_paths" if files else "data.path", options)
        if test:
            raise UserError(
                f"{printable(folder)} holds train/ and test/, which data.more_paths cannot join: name folders in them"
            )
        files += [replace(file, columns={"folder": composed(str(path))}) for file in train]
        places.update({os.path.realpath(file.path) for file in train})  # a link within a folder repeats none
    repeated = [path for path, count in places.items() if count > 1]
    if repeated:
        raise UserError(
            f"two of data.path and data.more_paths hold the same files: {listed(repeated, 3)}; name each once"
        )
    return files, []


def _listed_splits(root: Path, option: str, options: DataOptions) -> tuple[list[_ImageFile], list[_ImageFile]]:
    """List the training and test files below `root`, the value of `option`."""
    kind = kind_of(root)
    if kind != "folder":
        what = f"{printable(root)} is no folder" if kind == "file" else f"there is no folder {printable(root)}"
        raise UserError(f"{what}; set {option} to a folder of images{remedy([root])}")
    table_path = expand_home(options.labels) if isinstance(options.labels, Path) else None
    table = None if table_path is None else _read_table(table_path, root, options)
    by_folder = options.name == "folder" or options.labels == "folders"
    folders = _split_folders(root, options)
    images, left_out = list_files(root, options.follow_links)
    if table is not None and table_path is not None:
        names = [_name_below(root, path) for path in images]
        table = _by_files_names(table, names, table_path, root)
        left_out = [file for file in left_out if not (os.path.exists(file) and os.path.samefile(file, table_path))]

    def described(path: Path, folder: Path) -> _ImageFile | None:
        if by_folder:
            inner = path.relative_to(folder).parts
            return _ImageFile(path, composed(inner[0])) if len(inner) > 1 else None
        if table is None:
            return _ImageFile(path)
        columns = table.get(_name_below(root, path))
        if columns is None:
            return None
        label = None if options.label_column is None else columns[composed(options.label_column)]
        return _ImageFile(path, label, columns)

    splits = [
        [file for path in images if path.is_relative_to(folder) and (file := described(path, folder))]
        for folder in folders
    ]
    used = {file.path for files in splits for file in files}
    left_out += [path for path in images if path not in used]
    read = [f"{folder.name}/" for folder in folders] if len(folders) > 1 else []
    expected = [f"in {' or '.join(read)}"] if read else []
    expected += ["in the folder of its class"] if by_folder else ["on a line of the table"] if table is not None else []
    notify_of_left_out(left_out, root, " and ".join(expected))
    notify_of_masks(used, root)
    if by_folder:
        for folder, files in zip(folders, splits, strict=True):
            files.sort(key=lambda file: file.label or "")  # a stable sort: a class's files keep their order
            _require_no_empty_class(folder, {file.label for file in files}, left_out)
    if table is not None:
        present = {_name_below(root, path) for path in used}
        if len(present) < len(used):
            raise UserError(f"{printable(root)} has files whose names differ in the form of accents alone; rename them")
        outside = set(names) - present
        missing = {
            number: f"only {' and '.join(read)} are read"
            if name in outside
            else f"no image file in data.path that is read{remedy([Path(name)])}"
            if os.path.exists(root / name)
            else "there is no such file"
            for number, name in enumerate(table)
            if name not in present
        }
        report_broken([root / name for name in table], missing, options.broken)
    if not splits[0]:
        raise UserError(f"{printable(folders[0])} holds no image that can be used; set data.path to a folder of images")
    return splits[0], splits[1] if len(splits) > 1 else []


def _read_table(path: Path, root: Path, options: DataOptions) -> dict[str, dict[str, str]]:
    """Read a CSV file with a header: the values of each line by column, by the path of the line's file below `root`.

    Commas, semicolons or tabs separate the values. Spaces around a value do not count.
    """
    shown, file_column = printable(path), composed(options.file_column)
    label_column = None if options.label_column is None else composed(options.label_column)
    if kind_of(path) != "file":
        raise UserError(f"there is no table {shown}; set data.labels to a CSV file, or to folders")
    with explained(f"{shown} cannot be read as a table", "; save it as CSV in UTF-8"):
        text = composed(path.read_bytes().decode("utf-8-sig"))
        (_, columns), *lines = _numbered_lines(text, file_column)
    for option, name in (("file_column", file_column), ("label_column", label_column)):
        if name is not None and name not in columns:
            what = "" if option == "file_column" else ", or to null where the table has no labels"
            raise UserError(
                f"{shown} has the columns {listed(columns)}, but not {printable(name)}; set data.{option}{what}"
            )
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise UserError(f"{shown} has several columns named {listed(twice)}; rename them")
    if not lines:
        raise UserError(f"{shown} has no lines below its header; add one for each image, or set data.labels to another")
    table: dict[str, dict[str, str]] = {}
    again: list[str] = []
    for number, line in lines:
        if len(line) != len(columns):
            raise UserError(
                f"{shown}: line {number} has {len(line)} values, but the header has {len(columns)}; correct that line"
            )
        row = dict(zip(columns, line, strict=True))
        for column in (file_column, label_column):
            if column is not None and row[column] == "":
                raise UserError(f"{shown}: line {number} has no {printable(column)}; fill it in, or remove the line")
        name = _name_in_table(root, row[file_column])
        again += [name] * (name in table)
        table[name] = row
    if again:
        which = listed(sorted(set(again)))
        raise UserError(f"{shown} has {len(again)} files on more than one line: {which}; keep one line each")
    return table


def _by_files_names(
    table: dict[str, dict[str, str]], files: list[str], path: Path, root: Path
) -> dict[str, dict[str, str]]:
    """Return the table by the files' own names, also where its names lack or differ in folders, ending or zeros.

    Where some of its names are those of files, only the ending and leading zeros may differ in the others.
    """
    exact = table.keys() & set(files)
    if not files or len(exact) == len(table):
        return table
    taken_for: dict[str, str] = {}
    taken: set[str] = set()
    depths = [0] if exact else [0, *range(max(file.count("/") for file in files) + 1, 0, -1)]
    for depth in depths:
        named, present = (_by_like_name([n for n in names if n not in taken_for], depth) for names in (table, files))
        for key in named:  # in the table's order, in which the message below names the first one
            if key in present and len(named[key]) == len(present[key]) == 1 and present[key][0] not in taken:
                taken_for[named[key][0]] = present[key][0]
                taken.add(present[key][0])
    if not exact and not taken_for:
        raise UserError(
            f"{printable(path)}: the names in it are not the files' names: it has {printable(next(iter(table)))} and "
            f"{printable(root)} has {printable(files[0])}; correct the names or data.file_column"
        )
    changed = [pair for pair in taken_for.items() if pair[0] != pair[1]]
    if changed:
        notify(
            f"{len(changed)} of the table's {len(table)} names are not the files' names, and are taken for those that "
            f"alone are like them: {printable(changed[0][0])} for {printable(changed[0][1])}"
        )
    return {taken_for.get(name, name): row for name, row in table.items()}


def _by_like_name(names: Sequence[str], depth: int) -> dict[tuple[str, ...], list[str]]:
    """Return names by their last `depth` parts (0: all), without an image's ending, leading zeros and capitals."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        stem, suffix = os.path.splitext(name.replace("\\", "/").lower())
        parts = (stem if suffix in (*IMAGE_SUFFIXES, ARRAY_SUFFIX) else stem + suffix).split("/")
        found.setdefault((*parts[:-1], parts[-1].lstrip("0"))[-depth:], []).append(name)
    return found


def _numbered_lines(text: str, file_column: str) -> list[tuple[int, list[str]]]:
    """Return the lines of a table that hold a value, at least one, each with the number at which it ends.

    Columns are parted by what separates `file_column` from others in the first line; by commas if nothing does.
    """
    first = next((line for line in text.splitlines() if line.strip()), "")
    found = (one for one in ",;\t" if file_column in [name.strip().strip('"') for name in first.split(one)])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=next(found, ","), strict=True)
    lines = [(reader.line_num, values) for line in reader if any(values := [value.strip() for value in line])]
    return lines or [(1, [])]


def _name_below(root: Path, file: Path) -> str:
    return composed(file.relative_to(root).as_posix())


def _name_in_table(root: Path, name: str) -> str:
    """Return a file's path below `root` by its name in a table, which may be absolute or written as on Windows."""
    if "\\" in name and not os.path.exists(root / name):
        name = name.replace("\\", "/")
    if os.path.isabs(name) and "\0" not in name:
        file = Path(name)
        if not file.is_relative_to(root):  # the table names the folder by another path
            file, root = Path(os.path.realpath(file.parent), file.name), Path(os.path.realpath(root))
        name = os.path.relpath(file, root)
    return composed(os.path.normpath(name))


def _split_folders(root: Path, options: DataOptions) -> list[Path]:
    """Return the folders train/ and test/ if both exist, see `split_folders`, and else the folder itself."""
    folders = split_folders(root)
    if len(folders) == 2:
        if folders[1].name != "test":
            notify(f"the test images are those in {printable(folders[1])}")
        return folders
    if options.name == "folder":
        raise UserError(
            f"{printable(root)} lacks train/ or test/; data.path must hold train/CLASS/ and test/CLASS/, or set "
            "data.name=images for any other folder of images"
        )
    if folders and options.labels == "folders":
        raise UserError(
            f"{printable(folders[0])} has the name of a split, but there is no second one beside it such as train/ or "
            "test/: set data.path to that folder itself, or rename it if it is a class"
        )
    return [root]


def _require_no_empty_class(folder: Path, labels: set[str | None], left_out: Sequence[Path]) -> None:
    results = [path for path in left_out if path.is_dir()]
    empty = [
        inner.name
        for inner in subfolders(folder)
        if composed(inner.name) not in labels and not any(path.is_relative_to(inner) for path in results)
    ]
    if empty or not labels:
        what = f"; without an image: {listed(empty)}" if empty else ""
        raise UserError(f"{printable(folder)} needs one folder of images a class, none of them empty{what}")


def _class_names(train: Sequence[_ImageFile], test: Sequence[_ImageFile], by_number: bool) -> list[str]:
    """Return the classes in alphabetical order, or by their value where all are numbers; none without labels."""
    labels = {file.label for file in train if file.label is not None}
    unknown = {file.label for file in test if file.label is not None} - labels
    if unknown:
        raise UserError(f"test/ has classes that train/ lacks: {listed(sorted(unknown))}; give train/ images of them")
    if by_number and all(label.isdecimal() and len(label) < 1000 for label in labels):  # int() has a limit
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _split_off_test(files: list[_ImageFile], fraction: float) -> tuple[list[_ImageFile], list[_ImageFile]]:
    """Divide each class into training images, at least one, and the fraction that is for testing at every seed."""
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
    return [*compress(files, ~is_test)], [*compress(files, is_test)]
