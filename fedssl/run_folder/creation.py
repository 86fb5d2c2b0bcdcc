"""Making a run's folder, or replacing it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import UserError
from ..storage import cannot_write, sync_folder, write_atomically
from ..untrusted.files import absolute_path
from .lock import alone_in
from .manifest import first_checkpoint, write_manifest


def default_folder(name: str, seed: int) -> Path:
    """The folder of a run whose user names none.

    Raises:
        UserError: the recipe's name cannot be that of a folder.
    """
    if "/" in name:
        raise UserError(
            f"the recipe's name {name!r} holds a slash, so it cannot be a folder's name: change it, or name the run's "
            "folder with --output"
        )
    return Path("runs") / f"{name}-seed{seed}"


def is_run_folder(path: Path) -> bool:
    """Whether a folder is one that a run has made; nothing else may be replaced."""
    checkpoints = path / "checkpoints"
    return (
        (path / "recipe.yaml").is_file() and (checkpoints / "manifest.json").is_file() and not checkpoints.is_symlink()
    )


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Refuse a folder where no new run can be made, before anything is loaded.

    Args:
        path: the folder of the new run.
        overwrite: whether a run that is there may be replaced.

    Raises:
        UserError: the folder exists and may not be replaced: without `overwrite`, where another process works on it, or
            where it is something else than a run's folder.
    """
    if not os.path.lexists(path):
        return
    if not is_run_folder(path):
        raise UserError(
            f"{path} exists and is not the folder of a run, as it holds no recipe.yaml with checkpoints/manifest.json; "
            "only a run is replaced: name another --output"
        )
    if not overwrite:
        raise UserError(
            f"{path} exists: continue it with fedssl run --resume {path}, or give --overwrite, or another --output"
        )
    target = absolute_path(Path(), path)
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{path} is the working folder or one above it, so it is not replaced: name another --output")
    with alone_in(path):
        pass


@contextmanager
def new_run(path: Path, files: dict[str, str], overwrite: bool = False) -> Iterator[None]:
    """Make a new run's folder, and keep other processes from working on it; see `alone_in`.

    The folder gets its name only when it is complete.

    Args:
        path: the folder.
        files: texts to put in it, by file name; `recipe.yaml` is one of them.
        overwrite: replace the run in the folder where there is one.

    Raises:
        UserError: see `refuse_existing`; the folder cannot be written.
    """
    refuse_existing(path, overwrite)
    target = absolute_path(Path(), path)
    preparing = _beside(target, "preparing")
    with ExitStack() as stack:
        try:
            (preparing / "checkpoints").mkdir(parents=True)
            for name, text in files.items():
                write_atomically(preparing / name, text.encode())
            write_manifest(preparing, first_checkpoint(files))
            stack.enter_context(alone_in(preparing))
            _put_in_place(preparing, target, overwrite)
        except OSError as error:
            raise cannot_write(path, error) from error
        finally:
            shutil.rmtree(preparing, ignore_errors=True)
        yield


def _beside(target: Path, what: str) -> Path:
    """A new name in the same folder; nobody's folder has it already."""
    return target.with_name(f".{target.name[:80]}.{what}-{secrets.token_hex(4)}")


def _put_in_place(preparing: Path, target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        os.rename(preparing, target)
        sync_folder(target.parent)
        return
    with alone_in(target):
        if not overwrite or not is_run_folder(target):
            raise UserError(f"{target} was made by another process in the meantime: name another --output")
        replaced = _beside(target, "replaced")
        os.rename(target, replaced)
        os.rename(preparing, target)
        sync_folder(target.parent)
        shutil.rmtree(replaced)
