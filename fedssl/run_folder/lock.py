"""One process at a time works on a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


@contextmanager
def alone_in(path: Path, busy: str = "another process is at work on this run") -> Iterator[None]:
    """Keep other processes from working on the run in a folder as long as this process does.

    Args:
        path: the folder.
        busy: the error's text where another process is working on the run.

    Raises:
        UserError: another process is working on the run.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{path} cannot be opened as a folder: {error.strerror}") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path}: {busy}") from None
        except OSError:  # a file system without locks
            pass
        if not os.path.exists(path) or not os.path.samestat(os.fstat(folder), os.stat(path)):
            raise UserError(f"{path}: {busy}")  # which has put another folder in this one's place
        yield
    finally:
        os.close(folder)
