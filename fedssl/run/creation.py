"""What a run's folder is made of: how it is made and locked, and its manifest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ..errors import UserError
from ..options import Options, explain_errors
from ..untrusted import absolute_path, own_part_file, own_parts, parse_yaml, read_regular_file
from .storage import cannot_write, digest_of, sync_folder, write_atomically


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


STATE_FILE = r"(server|client-[0-9]{4,})\.round-[0-9]{5,}\.safetensors"


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Checkpoint(Options):
    """The last committed round, as the manifest holds it."""

    round: int = Field(-1, ge=-1, description="its number; -1 before the first commit")
    files: dict[str, Annotated[str, Field(pattern=f"^{STATE_FILE}$")]] = Field({}, description="state files by owner")
    lengths: dict[Annotated[str, Field(pattern=r"^[a-z]+\.csv$")], Annotated[int, Field(ge=0)]] = Field(
        {}, description="the committed length of the logs in bytes"
    )
    finished: bool = Field(False, description="whether it is the recipe's last round")
    digests: dict[str, _Digest] = Field(
        {}, description="SHA-256 by file name of what a resume relies on; empty in folders of earlier versions"
    )
    parts: dict[str, _Digest] = Field(
        {}, description="SHA-256 of the code of the parts of one's own when the run began, by their name in the recipe"
    )


def first_checkpoint(files: dict[str, str]) -> Checkpoint:
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    recipe = parse_yaml(files["recipe.yaml"], "recipe.yaml")
    sources = {name: own_part_file(name) for name in own_parts(recipe)} if isinstance(recipe, dict) else {}
    parts = {name: digest_of(file) for name, file in sources.items() if file is not None}
    return Checkpoint(digests=digests, parts=parts)


def write_manifest(path: Path, checkpoint: Checkpoint) -> None:
    values = checkpoint.model_dump()
    text = json.dumps(values | {"digest": _digest_of_values(values)}, indent=1)
    write_atomically(path / "checkpoints" / "manifest.json", text.encode())


def read_manifest(path: Path) -> Checkpoint:
    """The manifest of a run's folder; that of a run before its first commit where there is none."""
    file = path / "checkpoints" / "manifest.json"
    try:
        values = json.loads(read_regular_file(file))
        digest = values.pop("digest", None)  # earlier versions wrote none
        if digest is not None and digest != _digest_of_values(values):
            raise ValueError("it was changed or is damaged; put back the file as the run wrote it")
        return Checkpoint.model_validate(values)
    except (FileNotFoundError, NotADirectoryError):
        return Checkpoint()
    except ValidationError as error:
        problems = "; ".join(explain_errors(error, Checkpoint))
        raise UserError(f"{file} cannot be read as a checkpoint: {problems}") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as a checkpoint: {error}") from error


def _digest_of_values(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


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
