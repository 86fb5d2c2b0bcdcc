"""Read and write a run's folder: the resolved recipe, metrics, and a checkpoint that is complete at any moment.

    recipe.yaml                     every option with its value
    partition.csv                   images per client and class; with sites of their own images, those that each stated
    image_shape.json                channels, height and width of the images, so that an export needs no data
    data_digests.json               SHA-256 of each client's images and of the test images: a run goes on with the same
    metrics.csv                     round,client,metric,value; client is a number, `global`, or `mean`
    timings.csv                     round,seconds (not in metrics.csv, which is the same on every machine)
    refused.csv                     round,client,reason: answers that were left out, or (capped: ...) count by less
    history.csv                     the options that were changed when the run went on, if any
    spectrum.csv                    client,index,value: singular values of the final test representations
    tensorboard/                    the same metrics as TensorBoard events
    checkpoints/manifest.json       the last complete rounds and the files that belong to them
    checkpoints/*.safetensors       the server's state and each client's
    privacy_spent.json              with differential privacy: the rounds that count for each client
    sites_run.txt                   engine flower: the run's name at the sites, which keep the clients' states
    exported.txt                    where the encoder is that was exported last, if any

Renaming manifest.json commits a round. State files have the round in their name and never change, so a manifest
always points at whole files. metrics.csv only grows, and the manifest holds its length, so a resume cuts off the lines
that a killed run wrote after its last commit. The same way a run goes back to one of the rounds before it whose states
are kept. The manifest also holds the SHA-256 of every file that a resume relies on, and of the custom parts' code: a
run whose files were changed is refused. A log keeps its columns in later versions, which continue it too.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UserError, explained
from ..messages import Message
from ..untrusted import absolute_path, own_part_file, quoted
from .creation import STATE_FILE, Checkpoint, EarlierCheckpoint, is_run_folder, new_run, read_manifest, write_manifest
from .storage import (
    csv_text,
    digest_of,
    flush_files,
    make_folder,
    read_csv,
    read_message,
    remove_files,
    sync_path,
    write_atomically,
    write_message,
    writing,
    written_in_place,
)

MetricRow = tuple[int, str, str, float]
METRICS_HEADER = ("round", "client", "metric", "value")
IMAGE_SHAPE = "image_shape.json"
SITES_RUN = "sites_run.txt"  # if the sites keep the clients' states
EXPORTED = "exported.txt"
LOGS = ("metrics.csv", "timings.csv", "refused.csv")
HISTORY, HISTORY_HEADER = "history.csv", ("round", "when", "version", "option", "before", "after")
#: bytes of a round's states, of which one round is kept by default and not three
LARGE = 100_000_000
#: what `replace_files` may replace; the second name is of the file that is about to take the place of the first
_REPLACED = {name: f"{name}.next" for name in ("recipe.yaml", "data_digests.json", HISTORY)}


def client_file(index: int, round_number: int) -> str:
    """Return the name of the file with a client's state after a round."""
    return _state_file(_client_owner(index), round_number)


def _client_owner(index: int) -> str:
    """Return a client's name in the manifest and in file names."""
    return f"client-{index:04d}"


def _state_file(owner: str, round_number: int) -> str:
    return f"{owner}.round-{round_number:05d}.safetensors"


def _round_of_file(name: str) -> int:
    return int(name.split(".round-")[1].split(".")[0])


def _changes_by_round(name: str) -> bool:
    return name in LOGS or re.fullmatch(STATE_FILE, name) is not None


class RunDirectory:
    """One run's folder, and the states of the round that is not committed yet."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.checkpoint = read_manifest(path)
        self._written: dict[str, str] = {}  # file of each state of the round that is not committed yet, by owner
        self._digests: dict[str, str] = {}  # SHA-256 of the states among them that lie in this folder, by file
        self._hashed: dict[str, tuple[Any, int]] = {}  # the hash of each log up to a length in bytes

    @classmethod
    def create(cls, path: Path, files: dict[str, str], overwrite: bool = False) -> RunDirectory:
        """Make a new run's folder without keeping it locked; see `new_run`."""
        with new_run(path, files, overwrite):
            return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run's folder; raise UserError if it has no recipe.yaml or a damaged manifest."""
        if not (path / "recipe.yaml").is_file():
            raise UserError(f"{path} is not a run's folder: it holds no recipe.yaml")
        return cls(path)

    @property
    def clients_elsewhere(self) -> bool:
        """Return whether the sites keep the clients' states (engine flower), so this folder does not hold them."""
        return (self.path / SITES_RUN).is_file()

    @property
    def continued_by(self) -> str:
        """Return the words that tell what continues this run."""
        return "flwr run on its app" if self.clients_elsewhere else f"fedssl run --resume {quoted(self.path)}"

    def append_metrics(self, rows: Iterable[MetricRow]) -> None:
        """Append values in full precision to metrics.csv."""
        lines = [(number, client, metric, repr(float(value))) for number, client, metric, value in rows]
        self._append("metrics.csv", METRICS_HEADER, lines)

    def append_timing(self, round_number: int, seconds: float) -> None:
        """Append a round's wall-clock seconds to timings.csv."""
        self._append("timings.csv", ("round", "seconds"), [(round_number, f"{seconds:.3f}")])

    def append_refused(self, round_number: int, reasons: dict[int, str]) -> None:
        """Append the answers that a round left out or did not count in full to refused.csv; `reasons` is by client."""
        if reasons:
            rows = [(round_number, k, reason) for k, reason in reasons.items()]
            self._append("refused.csv", ("round", "client", "reason"), rows)

    def read_refused(self) -> list[tuple[int, int, str]]:
        """Return the committed lines of refused.csv: round, client and reason."""
        rows = self._read_log("refused.csv")
        return [(int(row["round"]), int(row["client"]), row["reason"]) for row in rows]

    def _read_log(self, name: str) -> list[dict[str, str]]:
        lengths = self.checkpoint.lengths
        if (digest := self.checkpoint.digests.get(name)) is not None:
            self._refuse_change(name, digest, lengths.get(name))
        return read_csv(self.path / name, lengths.get(name, 0 if lengths else None))

    def _append(self, name: str, header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        with written_in_place(self.path / name) as file:
            file.write(csv_text(rows if file.tell() else [header, *rows]).encode())

    def read_metrics(self) -> list[MetricRow]:
        """Return the committed metrics in their order; without a manifest, as in a copy, those of all complete lines.

        Raises:
            UserError: metrics.csv is damaged, or was changed since it was committed.
        """
        claim = f"{self.path / 'metrics.csv'} cannot be read"
        with explained(claim, f"; expected the columns {', '.join(METRICS_HEADER)}"):
            return [_metric_row(row) for row in self._read_log("metrics.csv")]

    def write_spectra(self, spectra: dict[str, Tensor]) -> None:
        """Write the singular values of the final representations, float [dimension] by client."""
        rows = [(who, i, repr(value)) for who, values in spectra.items() for i, value in enumerate(values.tolist())]
        write_atomically(self.path / "spectrum.csv", csv_text([("client", "index", "value"), *rows]).encode())

    def write_client(self, index: int, round_number: int, state: Message) -> None:
        """Write a client's state of a round, which the round's `commit` makes valid."""
        self._write_state(_client_owner(index), round_number, state)

    def adopt_client(self, index: int, round_number: int) -> None:
        """Register a client's state that the client itself has written (engine flower); see `write_client`."""
        self._written[_client_owner(index)] = name = client_file(index, round_number)
        if not self.clients_elsewhere:
            self._digests[name] = digest_of(self.checkpoints / name)

    @property
    def client_rounds(self) -> dict[int, int]:
        """Return the round of each client's last committed state; clients without one are left out."""
        return {
            int(owner.removeprefix("client-")): _round_of_file(file)
            for owner, file in self.checkpoint.files.items()
            if owner.startswith("client-")
        }

    def client_rounds_kept(self, index: int) -> list[int]:
        """Return the rounds of a client's states to which the run may return, its last one among them."""
        owner = _client_owner(index)
        checkpoints: list[EarlierCheckpoint] = [*self.checkpoint.earlier, self.checkpoint]
        return sorted({_round_of_file(one.files[owner]) for one in checkpoints if owner in one.files})

    def discard_client(self, index: int) -> None:
        """Discard a client's state of the round that is not committed yet."""
        self._written.pop(_client_owner(index), None)

    def _write_state(self, owner: str, round_number: int, state: Message) -> None:
        name = _state_file(owner, round_number)
        self._digests[name] = write_message(self.checkpoints / name, state, flush=False)
        self._written[owner] = name

    def commit(
        self,
        round_number: int,
        server: Message,
        finished: bool,
        keep: int | None = 1,
        measured: float | None = None,
        personal: bool = False,
    ) -> None:
        """Commit a round with the clients' states written in it; the other clients keep their files.

        The last `keep` rounds stay complete, this one among them; None keeps three, or one if states are large. Where
        the round has a higher `measured` value than each before, its models are kept as well: the clients' if they are
        `personal`, else the server's.
        """
        self._write_state("server", round_number, server)
        flush_files(self.checkpoints, self._digests)
        # sorted, because clients that train at the same time end in any order
        files = dict(sorted((self.checkpoint.files | self._written).items()))
        logs = {name: self._hash_log(name) for name in LOGS if (self.path / name).exists()}
        known = self.checkpoint.digests | self._digests  # not of states at a site, or of an earlier version's
        states = {name: known[name] for name in files.values() if name in known}
        kept = {name: digest for name, digest in self.checkpoint.digests.items() if not _changes_by_round(name)}
        if keep is None:
            keep = 3 if sum((self.checkpoints / name).stat().st_size for name in self._digests) < LARGE else 1
        best = self.checkpoint.best
        if measured is not None and (best is None or best.value is None or measured > best.value):
            chosen = files if personal else {"server": files["server"]}
            digests = {name: states[name] for name in chosen.values() if name in states}
            best = EarlierCheckpoint(round=round_number, value=measured, files=chosen, digests=digests)
        self.checkpoint = Checkpoint(
            round=round_number,
            files=files,
            lengths={name: length for name, (_, length) in logs.items()},
            finished=finished,
            # not of timings.csv: then two runs of one recipe and seed would differ in it
            digests=kept | {name: digest for name, (digest, _) in logs.items() if name != "timings.csv"} | states,
            earlier=self._earlier()[-keep + 1 :] if keep > 1 else [],
            best=best,
            parts=self.checkpoint.parts,
        )
        self._written, self._digests = {}, {}
        write_manifest(self.path, self.checkpoint)
        self._remove_unused()

    def _earlier(self) -> list[EarlierCheckpoint]:
        """Return the checkpoints before the next one."""
        last = self.checkpoint
        if last.round < 0:
            return []
        digests = {name: digest for name, digest in last.digests.items() if _changes_by_round(name)}
        kept = EarlierCheckpoint(
            round=last.round, files=last.files, lengths=last.lengths, digests=digests, best=last.best
        )
        return [*last.earlier, kept]

    def read_best(self) -> None:
        """Let the states be those of the best round; raise UserError if there is none or a file was changed."""
        best = self.checkpoint.best
        if best is None:
            raise UserError(
                f"{self.path} keeps no best round: set evaluation.keep_best=true and evaluation.every first"
            )
        for name, digest in best.digests.items():
            self._refuse_change(name, digest, None)
        self.checkpoint = self.checkpoint.model_copy(update={"round": best.round, "files": best.files})

    def _checkpoint_of(self, round_number: int) -> Checkpoint:
        """Return the run's checkpoint as it was after a round; raise UserError if it is not kept or was changed."""
        last = self.checkpoint
        earlier = {one.round: one for one in last.earlier}
        if round_number not in earlier:
            kept = ", ".join(map(str, earlier)) or "none"
            raise UserError(
                f"{self.path} cannot go back from round {last.round} to round {round_number}: the earlier rounds whose "
                f"states are kept are {kept} (the recipe's checkpoints says how many); choose one of them, or start a "
                "new run"
            )
        chosen = earlier.pop(round_number)
        for name, digest in chosen.digests.items():
            self._refuse_change(name, digest, chosen.lengths.get(name))
        unchanging = {name: digest for name, digest in last.digests.items() if not _changes_by_round(name)}
        before = [one for one in earlier.values() if one.round < round_number]
        changes = {"finished": False, "digests": unchanging | chosen.digests, "earlier": before}
        return last.model_copy(update=dict(chosen) | changes)

    def _hash_log(self, name: str) -> tuple[str, int]:
        """Return the SHA-256 and length of a log; reads only what earlier calls have not hashed."""
        digest, length = self._hashed.get(name, (hashlib.sha256(), 0))
        with open(self.path / name, "rb") as file:
            file.seek(length)
            added = file.read()
        digest.update(added)
        self._hashed[name] = digest, length + len(added)
        return digest.hexdigest(), length + len(added)

    def replace_files(self, files: Mapping[str, str], go_back_to: int | None = None) -> None:
        """Replace files that a resume relies on, as texts by name, all of them or none; the run is not finished then.

        With `go_back_to` that round becomes the last one; `roll_back` then removes what came after it. The new manifest
        decides: a kill before it leaves the old files, and after it `finish_replacing` takes the new.
        """
        checkpoint = self.checkpoint if go_back_to is None else self._checkpoint_of(go_back_to)
        make_folder(self.path / "tensorboard", within_run=True)
        for name in checkpoint.lengths:  # it will be added to these: a link is refused before anything changes
            with written_in_place(self.path / name):
                pass
        for name, text in files.items():
            write_atomically(self.path / _REPLACED[name], text.encode())
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
        self.checkpoint = checkpoint.model_copy(update={"finished": False, "digests": checkpoint.digests | digests})
        write_manifest(self.path, self.checkpoint)
        self.finish_replacing()

    def finish_replacing(self) -> None:
        """Put the files of `replace_files` in place, or remove those that the manifest does not know."""
        for name, next_name in _REPLACED.items():
            file = self.path / next_name
            with writing(file):
                if not file.is_file():
                    continue
                if self.checkpoint.digests.get(name) == digest_of(file):
                    os.replace(file, self.path / name)
                else:
                    file.unlink()
                sync_path(self.path)

    def require_unchanged(self, but: Collection[str] = ()) -> None:
        """Raise UserError unless the files, except those in `but`, are as the run wrote them; the logs may be longer.

        In folders of earlier versions, which hold no digests, only the logs' lengths are checked.
        """
        if not is_run_folder(self.path):
            raise UserError(
                f"{self.path} holds no checkpoints/manifest.json, so the run cannot be continued: put back the "
                f"checkpoints, or start it anew: fedssl run {quoted(self.path / 'recipe.yaml')} --output NEW-FOLDER"
            )
        for name, digest in self.checkpoint.digests.items():
            if name not in but:
                self._refuse_change(name, digest, self.checkpoint.lengths.get(name))
        for name, length in self.checkpoint.lengths.items():
            path = self.path / name
            size = path.stat().st_size if path.is_file() else 0
            if size < length:
                problem = f"has {size} bytes, but {length} were committed: put back the file as the run wrote it"
                raise UserError(f"{path} {problem}")

    def _refuse_change(self, name: str, expected: str, length: int | None) -> None:
        path = (self.checkpoints if re.fullmatch(STATE_FILE, name) else self.path) / name
        try:
            same = expected == digest_of(path, length)
        except OSError as error:
            advice = "put back the file as the run wrote it, or start a new run"
            raise UserError(f"{path} cannot be read: {error.strerror}; {advice}") from error
        if not same:
            advice = "put back the file as it was (also its line ends), or start a new run"
            raise UserError(f"{path} was changed since the run wrote it, or is damaged: {advice}")

    def part_unchanged(self, name: str) -> bool | None:
        """Return whether a custom part's code is the same as when the run began; None if that is unknown.

        It is always unknown for code in the run's folder, which whoever made the folder put there.
        """
        expected, file = self.checkpoint.parts.get(name), own_part_file(name)
        folder = absolute_path(Path(), self.path)
        if expected is None or file is None or absolute_path(Path(), file).is_relative_to(folder):
            return None
        try:
            return digest_of(file) == expected
        except OSError:
            return False

    def server_state(self) -> Message:
        """Return the server's last committed state."""
        return read_message(self.checkpoints / self.checkpoint.files["server"])

    def client_state(self, index: int) -> Message:
        """Return a client's last written state; an empty message if it has not taken part yet."""
        owner = _client_owner(index)
        name = self._written.get(owner) or self.checkpoint.files.get(owner)
        if name and self.clients_elsewhere:
            raise UserError(f"{self.path}: client {index}'s model is at its own site; only the client can evaluate it")
        return read_message(self.checkpoints / name) if name else Message()

    def roll_back(self) -> None:
        """Remove everything that an interrupted run wrote after its last commit."""
        for name in LOGS:
            path, length = self.path / name, self.checkpoint.lengths.get(name, 0)
            with writing(path):
                if path.exists() and not length:
                    path.unlink()
                elif path.exists() and path.stat().st_size > length:
                    with written_in_place(path) as file:
                        file.truncate(length)
        if not self.checkpoint.finished:  # of a round that was once the last one
            (self.path / "spectrum.csv").unlink(missing_ok=True)
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Remove unused states, and no other files."""
        kept: list[EarlierCheckpoint] = [self.checkpoint, *self.checkpoint.earlier]
        used = {file for one in (*kept, *(c.best for c in kept if c.best)) for file in one.files.values()}
        ours = re.compile(rf"{STATE_FILE}(\.partial)?|manifest\.json\.partial")
        with writing(self.checkpoints):
            unused = [name for name in os.listdir(self.checkpoints) if name not in used and ours.fullmatch(name)]
            remove_files(self.checkpoints, unused)


def _metric_row(row: dict[str, str]) -> MetricRow:
    """Parse a row of metrics.csv. Raise ValueError if no run writes such a row."""
    who = row["client"]
    if not re.fullmatch(r"global|mean|[0-9]{1,9}", who):
        raise ValueError(f"the client {who[:40]!r} is not a number, `global` or `mean`")
    number = int(row["round"])
    if not 0 <= number < 10**9:
        raise ValueError(f"the round {row['round'][:40]!r} is not a number from 0")
    return number, who, row["metric"], float(row["value"])
