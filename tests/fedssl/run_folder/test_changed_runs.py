"""A run is continued only from the files that it wrote: each change is named, and nothing is lost by the refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedssl.engines.in_process import resume, run
from fedssl.errors import UserError
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.engines.short_runs import SMALL, Stopped, StopsAfterRoundOne, everything


@pytest.fixture(scope="module")
def stopped(tiny, tmp_path_factory) -> Path:
    """A run that was stopped after the first of two rounds."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stopped):
        run(tiny(**SMALL), path, StopsAfterRoundOne())
    return path


@pytest.fixture
def copy(stopped, tmp_path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def file_of(path: Path, name: str) -> Path:
    """A file of a run by its name, or the state of `server` or of a client."""
    state = RunDirectory.open(path).checkpoint.files.get(name)
    return path / "checkpoints" / state if state else path / name


def with_crlf(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def without_a_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))


def with_a_flipped_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 4
    path.write_bytes(data)


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text().replace(old, new))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "metrics with CRLF": ("metrics.csv", with_crlf),
    "metrics deleted": ("metrics.csv", Path.unlink),
    "metrics without a line": ("metrics.csv", without_a_line),
    "metrics emptied": ("metrics.csv", lambda file: file.write_bytes(b"")),
    "metrics a pipe": ("metrics.csv", as_a_pipe),
    "timings without a line": ("timings.csv", without_a_line),
    "fewer rounds": ("recipe.yaml", replaced("rounds: 2", "rounds: 1")),
    "another learning rate": ("recipe.yaml", replaced("learning_rate: 0.0", "learning_rate: 0.1")),
    "recipe a pipe": ("recipe.yaml", as_a_pipe),
    "another partition": ("partition.csv", lambda file: file.write_text("client,0\n0,5\n")),
    "a bit of the server's state": ("server", with_a_flipped_bit),
    "a bit of a client's state": ("client-0001", with_a_flipped_bit),
    "a state deleted": ("client-0001", Path.unlink),
    "a state a pipe": ("client-0001", as_a_pipe),
    "a bit of the manifest": ("checkpoints/manifest.json", replaced('"round": 1', '"round": 0')),
    "the manifest deleted": ("checkpoints/manifest.json", Path.unlink),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_run_is_not_continued_and_nothing_in_it_is_lost(change, copy):
    name, make = CHANGES[change]
    file = file_of(copy, name)
    make(file)
    before = everything(copy)
    with pytest.raises(UserError, match=r"put back|is not a run's folder") as caught:
        resume(copy)
    assert file.name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert everything(copy) == before


def test_an_unchanged_run_is_continued_and_told_of_changes_when_it_has_finished(copy):
    assert resume(copy).checkpoint.finished
    with_crlf(copy / "metrics.csv")
    for call in (resume, read_run):
        with pytest.raises(UserError, match=r"metrics\.csv was changed since the run wrote it"):
            call(copy)


def without_digests(path: Path) -> None:
    """Make the manifest what an earlier version wrote."""
    file = path / "checkpoints" / "manifest.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: values[key] for key in ("round", "files", "lengths", "finished")}))


def test_a_run_of_an_earlier_version_is_continued_and_holds_digests_from_then_on(copy):
    without_digests(copy)
    assert read_run(copy).last_round == 1
    directory = resume(copy)
    assert directory.checkpoint.finished
    assert "metrics.csv" in directory.checkpoint.digests
    RunDirectory.open(copy).require_unchanged()
    with_a_flipped_bit(file_of(copy, "server"))
    with pytest.raises(UserError, match=r"server.*was changed"):
        resume(copy)


@pytest.mark.parametrize("name", ["metrics.csv", "timings.csv"])
def test_a_run_of_an_earlier_version_whose_log_is_too_short_is_refused(name, copy):
    without_digests(copy)
    without_a_line(copy / name)
    with pytest.raises(UserError, match=rf"{name} has \d+ bytes, but \d+ were committed"):
        resume(copy)


@pytest.mark.parametrize(
    "manifest",
    [
        "[]",
        "{}[",
        "[" * 100_000,
        '{"round": "x"}',
        '{"round": true}',
        '{"files": {"server": "../../../etc/passwd"}}',
        '{"lengths": {"metrics.csv": -1}}',
        '{"nonsense": 1}',
        '{"round": 1' + "0" * 5000 + "}",
    ],
)
def test_a_manifest_of_another_form_is_one_line(manifest, copy):
    (copy / "checkpoints" / "manifest.json").write_text(manifest)
    for call in (resume, read_run):
        with pytest.raises(UserError, match=r"manifest\.json cannot be read as a checkpoint") as caught:
            call(copy)
        assert str(caught.value).isprintable()


def test_what_is_no_state_stays_in_the_folder_of_checkpoints(copy):
    """Also where a received folder's checkpoints are a link to a folder of the user's."""
    (copy / "checkpoints" / "notes.txt").write_text("precious")
    (copy / "checkpoints" / "folder").mkdir()
    (copy / "checkpoints" / "server.round-00000.safetensors").write_text("old")
    (copy / "checkpoints" / "server.round-00002.safetensors.partial").write_text("torn")
    RunDirectory.open(copy).roll_back()
    kept = {path.name for path in (copy / "checkpoints").iterdir() if "round" not in path.name}
    assert kept == {"notes.txt", "folder", "manifest.json"}
    assert not list((copy / "checkpoints").glob("*00000*"))
    assert not list((copy / "checkpoints").glob("*.partial"))


def test_checkpoints_that_are_a_link_are_not_continued_from(copy, tmp_path):
    os.rename(copy / "checkpoints", tmp_path / "elsewhere")
    (copy / "checkpoints").symlink_to("../elsewhere")
    before = everything(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be continued"):
        resume(copy)
    assert everything(tmp_path / "elsewhere") == before


@pytest.mark.parametrize(
    "line", ["1,²,knn,3", "1,-1,knn,3", "1,../x,knn,3", "²,0,knn,3", "-1,0,knn,3", f"1,{'9' * 5000},k,3"]
)
def test_metrics_with_a_line_that_no_run_writes_are_told(line, copy):
    without_digests(copy)
    (copy / "checkpoints" / "manifest.json").unlink()
    with open(copy / "metrics.csv", "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"metrics\.csv cannot be read"):
        read_run(copy)
