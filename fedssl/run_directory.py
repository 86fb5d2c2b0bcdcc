"""A run's folder: the resolved recipe, metrics, and a checkpoint that is complete at every moment.

    recipe.yaml                     every option with its value
    partition.csv                   images per client and class
    image_shape.json                channels, height and width of the images, so that an export needs no data
    metrics.csv                     round,client,metric,value; client is a number, `global`, or `mean`
    timings.csv                     round,seconds (apart, so that metrics.csv is the same on every machine)
    refused.csv                     round,client,reason: answers that were left out; only where there were any
    spectrum.csv                    client,index,value: singular values of the test representations at the end
    tensorboard/                    the same metrics as TensorBoard events
    checkpoints/manifest.json       the last complete round and the files that belong to it
    checkpoints/*.safetensors       the server's state and each client's
    sites_run.txt                   engine flower: the run's name at the sites, which keep the clients' states

A round is committed by the rename of manifest.json. State files carry the round in their name and are never
changed, so a manifest always points at whole files. metrics.csv only grows, and the manifest holds its length, so
on resume the lines that a killed run wrote after its last commit are cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .errors import UserError
from .messages import Message
from .storage import cannot_write, csv_text, read_csv, read_message, sync_folder, write_atomically, write_message

MetricRow = tuple[int, str, str, float]
METRICS_HEADER = ("round", "client", "metric", "value")
#: the file with the shape of the run's images
IMAGE_SHAPE = "image_shape.json"
#: the file with the name by which the sites know the run; only where the sites keep the clients' states
SITES_RUN = "sites_run.txt"
LOGS = ("metrics.csv", "timings.csv", "refused.csv")


@dataclass
class Checkpoint:
    """The last committed round: its number, state files by owner, and the committed length of the logs in bytes."""

    round: int = -1
    files: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    finished: bool = False


def client_file(index: int, round_number: int) -> str:
    """The name of the file with a client's state after a round."""
    return _state_file(_client_owner(index), round_number)


def _client_owner(index: int) -> str:
    """How a client is called in the manifest and in its files' names."""
    return f"client-{index:04d}"


def _state_file(owner: str, round_number: int) -> str:
    return f"{owner}.round-{round_number:05d}.safetensors"


@contextmanager
def alone_in(path: Path, busy: str = "another process is at work on this run") -> Iterator[None]:
    """Keep other processes from working on the run in a folder as long as this process does.

    Args:
        path: the folder.
        busy: the error's text where another process is working on the run.

    Raises:
        UserError: another process is working on the run.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path}: {busy}") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(folder)


class RunDirectory:
    """Reads and writes one run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.checkpoint = self._read_manifest()
        self._written: dict[str, str] = {}  # states of the round that is not yet committed, by owner

    @classmethod
    def create(cls, path: Path, files: dict[str, str], overwrite: bool = False) -> RunDirectory:
        """Make a new run's folder; it gets its name only when it is complete.

        Args:
            path: the folder; it must not exist, unless `overwrite` is set.
            files: texts to put in it, by file name.
            overwrite: replace the folder where it exists.

        Raises:
            UserError: the folder exists, or cannot be written.
        """
        if path.exists() and not overwrite:
            raise UserError(
                f"{path} exists: continue it with fedssl run --resume {path}, or give --overwrite, or another --output"
            )
        preparing = path.with_name(f"{path.name}.preparing")
        try:
            shutil.rmtree(preparing, ignore_errors=True)  # left by a run that was killed at this point
            (preparing / "checkpoints").mkdir(parents=True)
            for name, text in files.items():
                write_atomically(preparing / name, text.encode())
            if path.exists():
                shutil.rmtree(path)
            os.rename(preparing, path)
            sync_folder(path.parent)
        except OSError as error:
            raise cannot_write(path, error) from error
        finally:
            shutil.rmtree(preparing, ignore_errors=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run's folder.

        Raises:
            UserError: the folder holds no recipe.yaml, or a manifest that cannot be read.
        """
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"{path} is not a run's folder: it holds no recipe.yaml")
        return cls(path)

    @property
    def clients_elsewhere(self) -> bool:
        """Whether the sites keep the clients' states (engine flower), so that they are not in this folder."""
        return (self.path / SITES_RUN).is_file()

    # Logs that only grow

    def append_metrics(self, rows: Iterable[MetricRow]) -> None:
        """Append values in full precision to metrics.csv."""
        lines = [(number, client, metric, repr(float(value))) for number, client, metric, value in rows]
        self._append("metrics.csv", METRICS_HEADER, lines)

    def append_timing(self, round_number: int, seconds: float) -> None:
        """Append a round's wall-clock seconds to timings.csv."""
        self._append("timings.csv", ("round", "seconds"), [(round_number, f"{seconds:.3f}")])

    def append_refused(self, round_number: int, reasons: dict[int, str]) -> None:
        """Append the answers that a round left out to refused.csv, a reason by client."""
        if reasons:
            rows = [(round_number, k, reason) for k, reason in reasons.items()]
            self._append("refused.csv", ("round", "client", "reason"), rows)

    def _append(self, name: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        path = self.path / name
        try:
            text = csv_text(rows if path.exists() else [header, *rows])
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(path, error) from error

    def read_metrics(self) -> list[MetricRow]:
        """The metrics up to the last committed round, in the order in which they were written.

        Where there is no manifest, as in a copy without checkpoints, all complete lines are read.

        Raises:
            UserError: metrics.csv is damaged.
        """
        path = self.path / "metrics.csv"
        try:
            rows = read_csv(path, self.checkpoint.lengths.get("metrics.csv"))
            return [(int(row["round"]), row["client"], row["metric"], float(row["value"])) for row in rows]
        except (OSError, ValueError, TypeError, KeyError) as error:
            expected = f"expected the columns {', '.join(METRICS_HEADER)}"
            raise UserError(f"{path} cannot be read: {expected}; {type(error).__name__}: {error}") from error

    def write_spectra(self, spectra: dict[str, Tensor]) -> None:
        """Write singular values of the final representations, float [dimension] by client."""
        rows = [(who, i, repr(value)) for who, values in spectra.items() for i, value in enumerate(values.tolist())]
        write_atomically(self.path / "spectrum.csv", csv_text([("client", "index", "value"), *rows]).encode())

    # Checkpoints

    def write_client(self, index: int, round_number: int, state: Message) -> None:
        """Write a client's state of a round; it counts from the round's `commit` on."""
        self._write_state(_client_owner(index), round_number, state)

    def adopt_client(self, index: int, round_number: int) -> None:
        """Take note of a client's state that the client itself has written (engine flower); see `write_client`."""
        self._written[_client_owner(index)] = client_file(index, round_number)

    @property
    def client_rounds(self) -> dict[int, int]:
        """The round of each client's last committed state; clients that have not taken part yet are left out."""
        return {
            int(owner.removeprefix("client-")): int(file.split(".round-")[1].split(".")[0])
            for owner, file in self.checkpoint.files.items()
            if owner.startswith("client-")
        }

    def client_round(self, index: int) -> int | None:
        """The round of a client's last committed state; None where it has not taken part yet."""
        return self.client_rounds.get(index)

    def discard_client(self, index: int) -> None:
        """Take back what `write_client` wrote in the round that is not yet committed."""
        self._written.pop(_client_owner(index), None)

    def _write_state(self, owner: str, round_number: int, state: Message) -> None:
        name = _state_file(owner, round_number)
        write_message(self.checkpoints / name, state)
        self._written[owner] = name

    def commit(self, round_number: int, server: Message, finished: bool) -> None:
        """Store a finished round with the clients' states written in it; the other clients keep their file."""
        self._write_state("server", round_number, server)
        files = self.checkpoint.files | self._written
        self._written = {}
        lengths = {name: (self.path / name).stat().st_size for name in LOGS if (self.path / name).exists()}
        self.checkpoint = Checkpoint(round_number, files, lengths, finished)
        self._write_manifest()
        self._remove_unused()

    def server_state(self) -> Message:
        """The server's last committed state."""
        return read_message(self.checkpoints / self.checkpoint.files["server"])

    def client_state(self, index: int) -> Message:
        """A client's last written state; empty where it has not taken part yet.

        Raises:
            UserError: the state is kept at the client's own site, or its file cannot be read.
        """
        owner = _client_owner(index)
        name = self._written.get(owner) or self.checkpoint.files.get(owner)
        if name and self.clients_elsewhere:
            raise UserError(f"{self.path}: client {index}'s model is at its own site; only the client can evaluate it")
        return read_message(self.checkpoints / name) if name else Message()

    def roll_back(self) -> None:
        """Remove what an interrupted run wrote after its last commit."""
        for name in LOGS:
            path, length = self.path / name, self.checkpoint.lengths.get(name, 0)
            if path.exists():
                if length:
                    os.truncate(path, length)
                else:
                    path.unlink()
        self._remove_unused()

    def _write_manifest(self) -> None:
        write_atomically(self.checkpoints / "manifest.json", json.dumps(vars(self.checkpoint), indent=1).encode())

    def _read_manifest(self) -> Checkpoint:
        path = self.checkpoints / "manifest.json"
        if not path.is_file():
            return Checkpoint()
        try:
            return Checkpoint(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} cannot be read as a checkpoint: {error}") from error

    def _remove_unused(self) -> None:
        used = {*self.checkpoint.files.values(), "manifest.json"}
        for path in self.checkpoints.iterdir():
            if path.name not in used:
                path.unlink(missing_ok=True)
