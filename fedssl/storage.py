"""Reading and writing files. A written file is whole or absent: it is written aside, flushed to the disk, renamed."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from .errors import UserError
from .messages import Message
from .untrusted.files import open_regular_file, read_regular_file
from .untrusted.printable import printable


def write_atomically(path: Path, data: bytes, flush: bool = True) -> None:
    """Write a file so that a crash at any moment leaves either the old content or the new one.

    Args:
        path: the file.
        data: its content.
        flush: False leaves it to the caller to call `flush_files` before anything relies on the file.

    Raises:
        UserError: the disk is full, or the file may not be written. The temporary file is removed.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.unlink(missing_ok=True)  # left by a process that was killed, or a link that leads out of the folder
        with open(temporary, "xb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if flush:
            sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def flush_files(folder: Path, names: Iterable[str]) -> None:
    """Flush files of a folder to the disk. After the first one the others cost little: most file systems write all.

    Raises:
        UserError: a file cannot be written.
    """
    for name in names:
        try:
            handle = os.open(folder / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise cannot_write(folder / name, error) from error
    sync_folder(folder)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they do not exist yet.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> UserError:
    """The one-line error for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no space left to write {path}: free some space and repeat the command; a run continues with "
            "fedssl run --resume"
        )
    return UserError(f"{path} cannot be written: {error.strerror or error}")


def digest_of(path: Path, length: int | None = None) -> str:
    """The SHA-256 of a file's first `length` bytes, by default of all, as 64 hexadecimal digits.

    Raises:
        OSError: the file is missing, not a regular file, or cannot be read.
    """
    digest = hashlib.sha256()
    left = float("inf") if length is None else length
    with open_regular_file(path) as file:
        while left > 0 and (block := file.read(int(min(left, 2**20)))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as the text of a CSV file; the first one is usually the header.

    Control characters in a text become escapes, see `printable`: each row is one line that every reader takes alike.
    """
    text = io.StringIO()
    cells = ([printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def read_csv(path: Path, length: int | None = None) -> list[dict[str, str]]:
    """A CSV file's rows by column name; no rows where there is no such file.

    Args:
        path: the file.
        length: how many bytes of it to read; by default all. A last line without a line end is not complete and is
            left out.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it is not CSV in UTF-8, or a row has not as many cells as the header.
    """
    try:
        data = read_regular_file(path)[:length]
    except FileNotFoundError:
        return []
    text = data[: data.rfind(b"\n") + 1].decode()
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if any(None in row or None in row.values() for row in rows):
        raise ValueError("a row has more or fewer cells than the header")
    return rows


def write_message(path: Path, message: Message, flush: bool = True) -> str:
    """Store a message as one safetensors file; its numbers, config and metrics are JSON in the file's header.

    Args:
        path: the file.
        message: what to store.
        flush: see `write_atomically`.

    Returns:
        The file's SHA-256, see `digest_of`.

    Raises:
        UserError: the file cannot be written.
    """
    # One entry: safetensors orders several entries at random, and equal states must be equal files.
    fields = {"numbers": message.numbers, "config": message.config, "metrics": message.metrics}
    header = {"message": json.dumps(fields)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
    data = save_tensors(tensors, metadata=header)
    write_atomically(path, data, flush)
    return hashlib.sha256(data).hexdigest()


def read_message(path: Path) -> Message:
    """Read what `write_message` wrote.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        data = read_regular_file(path)
        # Copies in torch's own memory: views of `data` would be aligned by chance, and a matrix product can round
        # differently on memory that is aligned differently.
        tensors = {name: tensor.clone() for name, tensor in load_tensors(data).items()}
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["message"])
        return Message(tensors, *_fields(header))
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as a checkpoint: {printable(str(error))}") from error


def _fields(header: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
    """Numbers, config and metrics. Earlier states hold metrics as numbers whose names begin with `metric/`."""
    prefix = "metric/"
    numbers = {name: value for name, value in header["numbers"].items() if not name.startswith(prefix)}
    earlier = {name.removeprefix(prefix): v for name, v in header["numbers"].items() if name.startswith(prefix)}
    return numbers, header["config"], earlier | header.get("metrics", {})
