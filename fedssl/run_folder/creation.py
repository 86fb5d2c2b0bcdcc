"""Make, replace and lock a run's folder, and read and write its manifest."""

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

from pydantic import Field

from ..errors import UserError, explained
from ..options import Options, validated
from ..untrusted import absolute_path, own_part_file, own_parts, parse_yaml, quoted, read_regular_file
from .storage import digest_of, require_place, sync_path, write_atomically, writing

STATE_FILE = r"(server|client-[0-9]{4,})\.round-[0-9]{5,}\.safetensors"
_StateFile = Annotated[str, Field(pattern=f"^{STATE_FILE}$")]
_Log = Annotated[str, Field(pattern=r"^[a-z]+\.csv$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # a SHA-256


class EarlierCheckpoint(Options):
    """A committed round to which a run can go back; its digests are those of its states and logs."""

    round: int = Field(-1, ge=-1)  # -1 before the first commit
    files: dict[str, _StateFile] = Field({})  # by owner
    lengths: dict[_Log, Annotated[int, Field(ge=0)]] = Field({})  # committed bytes
    digests: dict[str, _Digest] = Field({})  # of what a resume relies on; empty in folders of earlier versions
    value: float | None = Field(None)  # of the measure by which the best round is chosen; higher is better
    best: EarlierCheckpoint | None = Field(None)  # the best round by then, with its models' states alone


class Checkpoint(EarlierCheckpoint):
    """The last committed round, as stored in the manifest."""

    finished: bool = False  # whether the round is the recipe's last
    earlier: list[EarlierCheckpoint] = Field([])  # in ascending order
    parts: dict[str, _Digest] = Field({})  # of the custom parts' code when the run began, by name in the recipe


def write_manifest(path: Path, checkpoint: Checkpoint) -> None:
    """Write the manifest of a run's folder, which commits the checkpoint."""
    values = checkpoint.model_dump()
    text = json.dumps(values | {"digest": _digest_of_values(values)}, indent=1)
    write_atomically(path / "checkpoints" / "manifest.json", text.encode())


def read_manifest(path: Path) -> Checkpoint:
    """Return a run's manifest, or an empty checkpoint without one; raise UserError if it is damaged or was changed."""
    file = path / "checkpoints" / "manifest.json"
    with explained(problem := f"{file} cannot be read as a checkpoint"):
        try:
            values = json.loads(read_regular_file(file))
        except (FileNotFoundError, NotADirectoryError):
            return Checkpoint()
        digest = values.pop("digest", None)  # earlier versions wrote none
        if digest is not None and digest != _digest_of_values(values):
            raise ValueError("it was changed or is damaged; put back the file as the run wrote it")
        return validated(Checkpoint, values, problem)


def _digest_of_values(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def alone_in(path: Path, busy: str = "another process is at work on this run") -> Iterator[None]:
    """Keep other processes from working on the run in a folder until the block ends, or the process is killed.

    The folder itself is locked. The library `filelock` would put a lock file in it, which a read-only folder refuses.

    Raises:
        UserError: another process is working on the run (`busy` is the error's text), or there is no such folder.
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
            raise UserError(f"{path}: {busy}")  # it has replaced the folder
        yield
    finally:
        os.close(folder)


def default_folder(name: str, seed: int) -> Path:
    """Return the folder of a run for which the user names none."""
    if "/" in name:
        advice = "change it, or name the run's folder with --output"
        raise UserError(f"the recipe's name {name!r} holds a slash, so it cannot be a folder's name: {advice}")
    return Path("runs") / f"{name}-seed{seed}"


def is_run_folder(path: Path) -> bool:
    """Return whether a run has made this folder; nothing else may be replaced."""
    folder = path / "checkpoints"
    return (path / "recipe.yaml").is_file() and (folder / "manifest.json").is_file() and not folder.is_symlink()


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise UserError if a new run may not replace the folder, or none can be made there, before anything is loaded."""
    if not os.path.lexists(path):
        require_place(path)
        return
    if not is_run_folder(path):
        raise UserError(
            f"{path} exists and is not the folder of a run, as it holds no recipe.yaml with checkpoints/manifest.json; "
            "only a run is replaced: name another --output"
        )
    if not overwrite:
        advice = f"continue it with fedssl run --resume {quoted(path)}, or give --overwrite, or another --output"
        raise UserError(f"{path} exists: {advice}")
    if Path.cwd().is_relative_to(absolute_path(Path(), path)):
        raise UserError(f"{path} is the working folder or one above it, so it is not replaced: name another --output")
    with alone_in(path):
        pass


@contextmanager
def new_run(path: Path, files: dict[str, str], overwrite: bool = False) -> Iterator[None]:
    """Make a new run's folder, and keep other processes from working on it; see `alone_in`.

    The folder holds `files`, texts by file name with `recipe.yaml` among them, and gets its name when it is complete.

    Raises:
        UserError: see `refuse_existing`; the folder cannot be written.
    """
    refuse_existing(path, overwrite)
    target = absolute_path(Path(), path)
    preparing = _beside(target, "preparing")
    with ExitStack() as stack:
        try:
            with writing(path):
                (preparing / "checkpoints").mkdir(parents=True)
                for name, text in files.items():
                    write_atomically(preparing / name, text.encode())
                write_manifest(preparing, _first_checkpoint(files))
                stack.enter_context(alone_in(preparing))
                _put_in_place(preparing, target, overwrite)
        finally:
            shutil.rmtree(preparing, ignore_errors=True)
        yield


def _first_checkpoint(files: dict[str, str]) -> Checkpoint:
    recipe = parse_yaml(files["recipe.yaml"], "recipe.yaml")
    part_files = {name: own_part_file(name) for name in own_parts(recipe)} if isinstance(recipe, dict) else {}
    return Checkpoint(
        digests={name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()},
        parts={name: digest_of(file) for name, file in part_files.items() if file is not None},
    )


def _beside(target: Path, what: str) -> Path:
    """Return an unused name in the same folder."""
    return target.with_name(f".{target.name[:80]}.{what}-{secrets.token_hex(4)}")


def _put_in_place(preparing: Path, target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        os.rename(preparing, target)
        sync_path(target.parent)
        return
    with alone_in(target):
        if not overwrite or not is_run_folder(target):
            raise UserError(f"{target} was made by another process in the meantime: name another --output")
        replaced = _beside(target, "replaced")
        os.rename(target, replaced)
        os.rename(preparing, target)
        sync_path(target.parent)
        shutil.rmtree(replaced)
