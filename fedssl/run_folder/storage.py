"""Read and write files. A written file is whole or absent: it is written aside, flushed to the disk, and renamed."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import UserError, explained
from ..interrupts import interrupted_later
from ..untrusted import open_regular_file, printable, read_regular_file

if TYPE_CHECKING:  # a process that waits for runs writes files without torch
    from torch import Tensor

    from ..messages import Message

#: files flushed or removed at the same time. Flushing a hundred files took three quarters of the time that it took one
#: after another, and less than half while others wrote to the disk, because the disk joins concurrent requests.
_AT_A_TIME = 8
_LINKED = "a link stands there, or the file has another name too, and that file would change: put a copy in its place"
#: a text that a spreadsheet would compute, and one that was kept from that
_FORMULA = re.compile("'*[=+@-].")
#: the safetensors names of the dtypes
_DTYPES = {
    **{"torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.int32": "I32"},
    **{"torch.int64": "I64", "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64"},
    **{"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float64": "F64"},
    "torch.complex64": "C64",
}


def write_atomically(path: Path, *data: bytes | memoryview, flush: bool = True) -> None:
    """Write a file, in parts, so that a crash at any moment leaves either the old content or the new one.

    With `flush=False` the caller must call `flush_files` before anything relies on the file.

    Raises:
        UserError: the disk is full, or the file may not be written. The temporary file is removed.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.unlink(missing_ok=True)  # left by a process that was killed, or a link that leads out of the folder
        with open(temporary, "xb") as file:
            for part in data:
                file.write(part)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if flush:
            sync_path(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


@contextmanager
def written_in_place(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a run's folder to add to it or to cut it; a missing one is made.

    Raises:
        UserError: it cannot be written, or it may be another file too, by a link in a folder that somebody else made.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with writing(path):
        if path.is_symlink():
            raise OSError(errno.ELOOP, _LINKED)
        with open(os.open(path, flags, 0o666), "ab") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise OSError(errno.EMLINK, _LINKED)
            yield file
            file.flush()
            os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file's content, or a folder's entries so that a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _each(call: Callable[[str], object], names: Iterable[str]) -> None:
    with interrupted_later(), ThreadPoolExecutor(_AT_A_TIME) as threads:
        list(threads.map(call, names))


def flush_files(folder: Path, names: Iterable[str]) -> None:
    """Flush files of a folder to the disk, and then the folder."""

    def flush(name: str) -> None:
        with writing(folder / name):
            sync_path(folder / name)

    _each(flush, names)
    sync_path(folder)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files of a folder; missing ones are ignored. Raise OSError if one cannot be removed."""
    _each(lambda name: (folder / name).unlink(missing_ok=True), names)


def require_new_folder(folder: Path) -> None:
    """Raise a UserError where something is at `folder`, unless it is an empty folder, or nothing can be made there."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: name a new folder, or remove that one")
    require_place(folder)


def require_file_name(path: Path) -> None:
    """Raise a UserError where no file can be written to `path`, before the work whose result it gets."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file to write, such as {path / 'FILE'}")
    require_place(path)


def require_place(path: Path) -> None:
    """Raise a UserError where nothing can be made at `path`; it and folders above it may be missing."""
    place = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    with writing(path), tempfile.TemporaryFile(dir=place), suppress(FileNotFoundError):
        os.lstat(place / path.name)  # which may be too long for a name, also where folders above it are missing


def make_folder(path: Path, within_run: bool = False) -> None:
    """Make a folder and those above it if they do not exist; raise UserError if that fails.

    A folder `within_run`, in a run's folder that somebody else may have made, must not be a link to another one.
    """
    with writing(path):
        if within_run and path.is_symlink():
            raise OSError(errno.ELOOP, _LINKED)
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError of the body as the UserError of `cannot_write`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the one-line error for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "free some space and repeat the command; a run continues with fedssl run --resume"
        return UserError(f"no space left to write {path}: {advice}")
    return UserError(f"{path} cannot be written: {error.strerror or error}")


def digest_of(path: Path, length: int | None = None) -> str:
    """Return the SHA-256 of a file's first `length` bytes, by default all, in hexadecimal; OSError is passed on."""
    digest = hashlib.sha256()
    left = float("inf") if length is None else length
    with open_regular_file(path) as file:
        while left > 0 and (block := file.read(int(min(left, 2**20)))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def csv_text(rows: Iterable[Sequence[object]], as_texts: bool = True) -> str:
    """Return rows as the text of a CSV file; the first one is usually the header.

    Control characters in a text are escaped, see `printable`, so each row is one line for every reader. A text that a
    spreadsheet would compute as a formula gets an apostrophe before it, which `read_csv` takes away; not with
    `as_texts=False`, for files whose texts another program joins with its own, such as names of images.
    """
    text = io.StringIO()
    shown = (lambda cell: _as_text(printable(cell))) if as_texts else printable
    cells = ([shown(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def _as_text(cell: str) -> str:
    if not _FORMULA.match(cell):
        return cell
    with suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def _as_read(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def read_csv(path: Path, length: int | None = None) -> list[dict[str, str]]:
    """Return the rows of a CSV file by column name, without the header; see `read_rows`."""
    header, *rows = read_rows(path, length) or [[]]
    return [dict(zip(header, row, strict=True)) for row in rows]


def read_rows(path: Path, length: int | None = None) -> list[list[str]]:
    """Return the rows in the first `length` bytes of a CSV file, by default all; the first is the header.

    A missing file has no rows. A last line without a line end is incomplete and left out, as are empty lines.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it is not CSV in UTF-8, or a row has more or fewer cells than the header.
    """
    try:
        data = read_regular_file(path)[:length]
    except FileNotFoundError:
        return []
    text = data[: data.rfind(b"\n") + 1].decode()
    try:
        rows = [[_as_read(cell) for cell in row] for row in csv.reader(io.StringIO(text, newline="")) if row]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if any(len(row) != len(rows[0]) for row in rows):
        raise ValueError("a row has more or fewer cells than the header")
    return rows


def write_message(path: Path, message: Message, flush: bool = True) -> str:
    """Store a message as a safetensors file, with its numbers, config and metrics as JSON in the header.

    Returns the file's SHA-256, see `digest_of`. For `flush` see `write_atomically`.
    """
    fields = {"numbers": message.numbers, "config": message.config, "metrics": message.metrics}
    parts = safetensors_parts(message.tensors, {"message": json.dumps(fields)})
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    write_atomically(path, *parts, flush=flush)
    return digest.hexdigest()


def safetensors_parts(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """Return the content of a safetensors file: its header, and each tensor's bytes without a copy.

    The library's `save` copies them twice, which took most of the time of writing a client's state. Equal tensors and
    metadata give equal files. Larger dtypes come first, so each tensor is aligned.
    """
    import torch

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    order = sorted(stored, key=lambda name: (-stored[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": metadata}
    parts: list[bytes | memoryview] = []
    end = 0
    for name in order:
        tensor = stored[name]
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, *parts]


def read_message(path: Path) -> Message:
    """Read what `write_message` wrote; raise UserError if the file is missing or damaged."""
    from ..messages import Message

    with explained(f"{path} cannot be read as a checkpoint"):
        data = read_regular_file(path)
        tensors = safetensors_of(data)
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["message"])
        return Message(tensors, fields["numbers"], fields["config"], fields["metrics"])


def safetensors_of(data: bytes) -> dict[str, Tensor]:
    """Return the tensors in the content of a safetensors file, in torch's own memory.

    Views of `data` would be aligned by chance, and a matrix product can round differently on memory that is aligned
    differently.
    """
    from safetensors.torch import load

    return {name: tensor.clone() for name, tensor in load(data).items()}
