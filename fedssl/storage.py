"""Files that are whole or absent: written aside, flushed to the disk, renamed."""

from __future__ import annotations

import errno
import json
import os
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


def write_message(path: Path, message: Message) -> None:
    """Store a message as one safetensors file; numbers, config and metrics stand as JSON in its header."""
    # One entry: safetensors writes several in random order, and equal states must be equal files.
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
        # Copies in torch's own memory: as views of `data` they would be aligned by chance, and a matrix product may
        # round differently on memory that is aligned differently.
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
