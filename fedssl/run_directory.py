"""A run's folder: the resolved recipe, metrics, and a checkpoint that is complete at every moment.

    recipe.yaml                     every option with its value
    partition.csv                   images per client and class
    metrics.csv                     round,client,metric,value; client is a number, `global`, or `mean`
    timings.csv                     round,seconds (apart, so that metrics.csv is the same on every machine)
    refused.csv                     round,client,reason: answers that were left out, where there were any
    spectrum.csv                    client,index,value: singular values of the test representations at the end
    tensorboard/                    the same metrics as TensorBoard events
    checkpoints/manifest.json       the last complete round and the files that belong to it
    checkpoints/*.safetensors       the server's state and each client's
    sites_run.txt                   engine flower: the run's name at the sites, which keep the clients' states

A round is committed by the rename of manifest.json. State files carry the round in their name and are never
changed, so a manifest always points at whole files; metrics.csv only grows, and the manifest holds its length, so
what a killed run wrote after its last commit is cut off on resume.
"""

from __future__ import annotations

import csv
import fcntl
import io
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
from .storage import cannot_write, read_message, sync_folder, write_atomically, write_message

MetricRow = tuple[int, str, str, float]
METRICS_HEADER = ("round", "client", "metric", "value")
#: holds the name by which the sites know the run; only where the clients' states are at sites of their own
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
    return f"client-{index:04d}.round-{round_number:05d}.safetensors"


@contextmanager
def alone_in(path: Path, busy: str = "another process is at work on this run") -> Iterator[None]:
    """Keep other processes from working on the run in this folder, as long as this one does.

    Args:
        path: the folder.
        busy: what is said where another process holds it.

    Raises:
        UserError: another process is at work on it.
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
        """Make a new run's folder; it appears under its name only when complete.

        Args:
            path: must not exist, unless `overwrite`.
            files: texts to put in it, by file name.
        """
        if path.exists() and not overwrite:
            raise UserError(
                f"{path} exists: continue it with fedssl run --resume {path}, or give --overwrite, or another --output"
            )
        preparing = path.with_name(f"{path.name}.preparing")
        try:
            shutil.rmtree(preparing, ignore_errors=True)  # of a run that was killed here
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
        """Open an existing run's folder."""
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"{path} is not a run's folder: it holds no recipe.yaml")
        return cls(path)

    @property
    def clients_elsewhere(self) -> bool:
        """Whether the clients keep their states at sites of their own (engine flower)."""
        return (self.path / SITES_RUN).is_file()

    # Logs that only grow

    def append_metrics(self, rows: Iterable[MetricRow]) -> None:
        self._append("metrics.csv", METRICS_HEADER, [(r, c, m, repr(float(v))) for r, c, m, v in rows])

    def append_timing(self, round_number: int, seconds: float) -> None:
        self._append("timings.csv", ("round", "seconds"), [(round_number, f"{seconds:.3f}")])

    def append_refused(self, round_number: int, reasons: dict[int, str]) -> None:
        if reasons:
            rows = [(round_number, k, reason) for k, reason in reasons.items()]
            self._append("refused.csv", ("round", "client", "reason"), rows)

    def _append(self, name: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        path = self.path / name
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        try:
            if not path.exists():
                writer.writerow(header)
            writer.writerows(rows)
            with open(path, "a", encoding="utf-8") as file:
                file.write(text.getvalue())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(path, error) from error

    def read_metrics(self) -> list[MetricRow]:
        path = self.path / "metrics.csv"
        if not path.is_file():
            return []
        with open(path, newline="", encoding="utf-8") as file:
            return [
                (int(row["round"]), row["client"], row["metric"], float(row["value"])) for row in csv.DictReader(file)
            ]

    def write_spectra(self, spectra: dict[str, Tensor]) -> None:
        """Singular values of the final representations, by client."""
        lines = ["client,index,value"]
        lines += [f"{who},{i},{v!r}" for who, values in spectra.items() for i, v in enumerate(values.tolist())]
        write_atomically(self.path / "spectrum.csv", ("\n".join(lines) + "\n").encode())

    # Checkpoints

    def write_client(self, index: int, round_number: int, state: Message) -> None:
        """Write a client's state of a round; it counts from the round's `commit` on."""
        self._write_state(f"client-{index:04d}", round_number, state)

    def adopt_client(self, index: int, round_number: int) -> None:
        """Note a client's state of a round that the client itself has written (engine flower); as `write_client`."""
        self._written[f"client-{index:04d}"] = client_file(index, round_number)

    def client_round(self, index: int) -> int | None:
        """The round of a client's last committed state; None where it has not taken part yet."""
        name = self.checkpoint.files.get(f"client-{index:04d}")
        return None if name is None else int(name.split(".round-")[1].split(".")[0])

    def discard_client(self, index: int) -> None:
        """Take back what `write_client` wrote in the round that is not yet committed."""
        self._written.pop(f"client-{index:04d}", None)

    def _write_state(self, owner: str, round_number: int, state: Message) -> None:
        name = f"{owner}.round-{round_number:05d}.safetensors"
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
        return read_message(self.checkpoints / self.checkpoint.files["server"])

    def client_state(self, index: int) -> Message:
        """A client's last written state; empty where it has not taken part yet."""
        owner = f"client-{index:04d}"
        name = self._written.get(owner) or self.checkpoint.files.get(owner)
        if name and self.clients_elsewhere:
            raise UserError(f"{self.path}: client {index}'s model is at its own site; only the client can evaluate it")
        return read_message(self.checkpoints / name) if name else Message()

    def roll_back(self) -> None:
        """Drop what an interrupted run wrote after its last commit."""
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
