"""Reading and writing files. A written file is whole or absent: it is written aside, flushed to the disk, renamed."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from .errors import UserError
from .messages import Message


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash at any moment leaves either the old content or the new one.

    Raises:
        UserError: the disk is full, or the file may not be written. The temporary file is removed.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


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
        return UserError(f"no space left to write {path}: free some space, then continue with fedssl run --resume")
    return UserError(f"{path} cannot be written: {error.strerror or error}")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows as the text of a CSV file; the first one is usually the header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_csv(path: Path, length: int | None = None) -> list[dict[str, str]]:
    """A CSV file's rows by column name; no rows where there is no such file.

    Args:
        path: the file.
        length: how many bytes of it to read; by default all. A last line without a line end is not complete and is
            left out.
    """
    if not path.is_file():
        return []
    data = path.read_bytes()[:length]
    text = data[: data.rfind(b"\n") + 1].decode()
    return list(csv.DictReader(io.StringIO(text)))


def write_message(path: Path, message: Message) -> None:
    """Store a message as one safetensors file; its numbers, config and metrics are JSON in the file's header.

    Raises:
        UserError: the file cannot be written.
    """
    # One entry: safetensors orders several entries at random, and equal states must be equal files.
    fields = {"numbers": message.numbers, "config": message.config, "metrics": message.metrics}
    header = {"message": json.dumps(fields)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in message.tensors.items()}
    write_atomically(path, save_tensors(tensors, metadata=header))


def read_message(path: Path) -> Message:
    """Read what `write_message` wrote.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        data = path.read_bytes()
        # Copies in torch's own memory: views of `data` would be aligned by chance, and a matrix product can round
        # differently on memory that is aligned differently.
        tensors = {name: tensor.clone() for name, tensor in load_tensors(data).items()}
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["message"])
        return Message(tensors, *_fields(header))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a checkpoint: {error}") from error


def _fields(header: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
    """Numbers, config and metrics. Earlier states hold metrics as numbers whose names begin with `metric/`."""
    prefix = "metric/"
    numbers = {name: value for name, value in header["numbers"].items() if not name.startswith(prefix)}
    earlier = {name.removeprefix(prefix): v for name, v in header["numbers"].items() if name.startswith(prefix)}
    return numbers, header["config"], earlier | header.get("metrics", {})
