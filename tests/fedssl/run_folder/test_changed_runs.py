"""A run is continued, and measured again, only from the files that it wrote and with the data with which it began."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedssl.data.digests import DATA_DIGESTS, differences
from fedssl.engines import in_process
from fedssl.engines.in_process import resume
from fedssl.errors import UserError
from fedssl.federation import build_federation, require_same_data
from fedssl.recipe.reading import load_recipe
from fedssl.reports.evaluation import write_evaluation
from fedssl.reports.report import write_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.short_runs import SMALL, StopsAfterRoundOne, everything
from tests.fedssl.killed_runs import Killed


@pytest.fixture(scope="module")
def begun(tiny, tmp_path_factory) -> tuple[Path, Path]:
    """A run of three clients that was stopped after the first of two rounds, and its folder of images.

    These are fifteen training and five test images of each of two classes.
    """
    folder = tmp_path_factory.mktemp("begun")
    for number in range(40):
        split, kind = "train" if number < 30 else "test", "ab"[number % 2]
        save_array(folder / "images" / split / kind / f"{number:02}.bmp", random_pixels(8, 8, seed=number))
    data = {"name": "folder", "path": str(folder / "images"), "image_size": 8}
    recipe = tiny(**AVERAGED, data=data, partition={"name": "iid", "clients": 3}, evaluation=SMALL["evaluation"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with pytest.raises(Killed):
            in_process.run(recipe, folder / "run", StopsAfterRoundOne())
    return folder / "run", folder / "images"


@pytest.fixture
def run(begun, tmp_path, monkeypatch) -> Path:
    """A copy of the run; the cache is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(begun[0], tmp_path / "run")
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


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(file.read_text().replace(old, new))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "metrics with CRLF": ("metrics.csv", with_crlf),
    "timings without a line": ("timings.csv", without_a_line),
    "fewer rounds": ("recipe.yaml", replaced("rounds: 2", "rounds: 1")),
    "another partition": ("partition.csv", lambda file: file.write_text("client,0\n0,5\n")),
    "a bit of the server's state": ("server", with_a_flipped_bit),
    "a bit of a client's state": ("client-0001", with_a_flipped_bit),
    "a state deleted": ("client-0001", Path.unlink),
    "a bit of the manifest": ("checkpoints/manifest.json", replaced('"round": 1', '"round": 0')),
    "the manifest deleted": ("checkpoints/manifest.json", Path.unlink),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_run_is_not_continued_and_nothing_in_it_is_lost(change, run):
    name, make = CHANGES[change]
    file = file_of(run, name)
    make(file)
    before = everything(run)
    with pytest.raises(UserError, match=r"put back|is not a run's folder") as caught:
        resume(run)
    assert file.name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert everything(run) == before


def without_digests(path: Path, **more: object) -> None:
    """Make the manifest what an earlier version wrote, with more in it if that is given."""
    file = path / "checkpoints" / "manifest.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: values[key] for key in ("round", "files", "lengths", "finished")} | more))


def test_a_run_of_an_earlier_version_is_continued_and_holds_digests_from_then_on(run):
    """A finished run is told of changes, too."""
    without_digests(run)
    assert read_run(run).last_round == 1
    assert resume(run).checkpoint.finished
    RunDirectory.open(run).require_unchanged()
    with_a_flipped_bit(file_of(run, "server"))
    with pytest.raises(UserError, match=r"server.*was changed"):
        resume(run)
    with_crlf(run / "metrics.csv")
    for call in (resume, read_run):
        with pytest.raises(UserError, match=r"metrics\.csv was changed since the run wrote it"):
            call(run)


@pytest.mark.parametrize(
    "manifest",
    [
        "[]",
        "{}[",
        "[" * 100_000,
        '{"round": true}',
        '{"files": {"server": "../../../etc/passwd"}}',
        '{"lengths": {"metrics.csv": -1}}',
        '{"round": 1' + "0" * 5000 + "}",
    ],
)
def test_a_manifest_of_another_form_is_one_line(manifest, run):
    (run / "checkpoints" / "manifest.json").write_text(manifest)
    for call in (resume, read_run):
        with pytest.raises(UserError, match=r"manifest\.json cannot be read as a checkpoint") as caught:
            call(run)
        assert str(caught.value).isprintable()


def test_what_is_no_state_stays_in_the_folder_of_checkpoints(run):
    folder = run / "checkpoints"
    (folder / "notes.txt").write_text("precious")
    (folder / "folder").mkdir()
    before = {path.name for path in folder.iterdir()}
    (folder / "server.round-00000.safetensors").write_text("old")
    (folder / "server.round-00002.safetensors.partial").write_text("torn")
    RunDirectory.open(run).roll_back()
    assert {path.name for path in folder.iterdir()} == before


def test_checkpoints_that_are_a_link_are_not_continued_from(run, tmp_path):
    os.rename(run / "checkpoints", tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to("../elsewhere")
    before = everything(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be continued"):
        resume(run)
    assert everything(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["timings.csv", "refused.csv"])
def test_a_log_that_is_also_another_file_is_neither_cut_nor_added_to(name, link, run, tmp_path):
    """A received folder could hold a link to a file of the user's."""
    content = (run / name).read_bytes() if (run / name).exists() else b""
    (tmp_path / "precious").write_bytes(content + b"2,1.5\n")
    (run / name).unlink(missing_ok=True)
    link(tmp_path / "precious", run / name)
    with pytest.raises(
        UserError, match=rf"{name} cannot be written: a link stands there, or the file has another name"
    ):
        RunDirectory.open(run).roll_back() if content else RunDirectory.open(run).append_refused(2, {0: "why"})
    assert (tmp_path / "precious").read_bytes() == content + b"2,1.5\n"


@pytest.mark.parametrize(
    ("name", "changes"), [("timings.csv", ["rounds=3"]), ("tensorboard", ["rounds=3"]), ("tensorboard", [])]
)
def test_a_run_is_not_continued_and_no_file_changes_where_a_link_is_added_to(name, changes, run, tmp_path):
    (run / "tensorboard").mkdir(exist_ok=True)
    (run / "tensorboard" / "events").write_text("precious")
    (run / name).rename(tmp_path / "precious")
    (run / name).symlink_to(tmp_path / "precious")
    before = everything(run), everything(tmp_path / "precious")
    with pytest.raises(UserError, match=f"{name} cannot be written: a link stands there"):
        resume(run, overrides=changes)
    assert (everything(run), everything(tmp_path / "precious")) == before


# The data


OTHERS = "no longer has the same images and labels in the same order"


@pytest.fixture
def images(begun, tmp_path) -> Iterator[Path]:
    """The run's images, which a test may change."""
    shutil.copytree(begun[1], tmp_path / "original")
    yield begun[1]
    begun[1].unlink() if begun[1].is_symlink() else shutil.rmtree(begun[1])
    shutil.move(tmp_path / "original", begun[1])


def replace(file: Path, seed: int = 99) -> None:
    """Write another image of the same size in bytes, with the same times."""
    before = file.stat()
    save_array(file, random_pixels(8, 8, seed=seed))
    assert file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


DATA_CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image added": (
        lambda folder: save_array(folder / "train" / "a" / "00b.bmp", random_pixels(8, 8, seed=50)),
        r"client 0 now has 11 images \(had 10\), client 1 no longer has",
    ),
    "an image replaced": (lambda folder: replace(folder / "train/a/02.bmp"), rf"began: client \d {OTHERS};"),
    "of another class": (
        lambda folder: (folder / "train/a/28.bmp").rename(folder / "train/b/28.bmp"),
        rf"client \d {OTHERS}",
    ),
    "a class renamed": (
        lambda folder: [(folder / split / "b").rename(folder / split / "c") for split in ("train", "test")],
        rf"client 0 {OTHERS}, .*, the test set {OTHERS}",
    ),
    "a test image removed": (
        lambda folder: (folder / "test/a/30.bmp").unlink(),
        r"began: the test set now has 9 images \(had 10\);",
    ),
}


@pytest.mark.parametrize("change", DATA_CHANGES)
def test_with_changed_data_a_run_is_not_continued_and_nothing_in_it_is_lost(change, run, images):
    make, says = DATA_CHANGES[change]
    make(images)
    with open(run / "timings.csv", "a") as file:
        file.write("2,half a li")  # which a run that goes on cuts off
    before = everything(run)
    with pytest.raises(UserError, match=f"the data of .*{says}"):
        resume(run)
    assert everything(run) == before


def test_public_and_downstream_data_count_too(tiny, tmp_path):
    arrays = {"x_train": random_pixels(30, 8, 8), "y_train": np.arange(30) % 2}
    arrays |= {"x_test": random_pixels(10, 8, 8, seed=1), "y_test": np.arange(10) % 2}
    arrays |= {"x_val": random_pixels(8, 8, 8, seed=2), "y_val": np.arange(8) % 2}
    for name in ("own", "public", "other"):
        np.savez(tmp_path / f"{name}.npz", **arrays)
    data = {"name": "npz", "path": str(tmp_path / "own.npz"), "public_path": str(tmp_path / "public.npz")}
    other = {"other": {"name": "npz", "path": str(tmp_path / "other.npz")}}
    changes = {"data": data, "evaluation": {"downstream": other}, "partition": {"name": "iid", "clients": 1}}
    before = build_federation(tiny(**changes)).data_digests()
    expected = {
        ("public", "x_train"): {"the set of public images"},
        ("other", "x_train"): {"the training set of evaluation.downstream.other"},
        ("other", "y_test"): {"the test set of evaluation.downstream.other"},
        ("own", "x_val"): {"the validation set"},
        ("own", "y_train"): {"client 0"},
    }
    for (name, key), differ in expected.items():
        np.savez(tmp_path / f"{name}.npz", **arrays | {key: arrays[key][::-1]})
        now = build_federation(tiny(**changes)).data_digests()
        assert {part for part in now if now[part] != before[part]} == differ
        np.savez(tmp_path / f"{name}.npz", **arrays)
    gone = ("the set of public images", 30), ("the test set", 10), ("the validation set", 8)
    assert differences(before, {}) == {name: f"{name} now has 0 images (had {count})" for name, count in gone}


def test_moved_data_with_new_times_and_no_cache_are_the_same(run, images, tmp_path):
    shutil.copytree(images, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    shutil.rmtree(images)
    images.symlink_to(tmp_path / "elsewhere")
    assert resume(run).checkpoint.finished


def test_of_a_run_without_digests_the_data_cannot_be_checked(run, images, caplog):
    replace(images / "train" / "a" / "02.bmp")
    (run / DATA_DIGESTS).unlink()
    federation = build_federation(load_recipe(run / "recipe.yaml"))
    require_same_data(run, federation.data_digests())
    assert [record.getMessage() for record in caplog.records if "cannot be checked" in record.getMessage()] != []


def test_a_finished_run_is_measured_and_drawn_with_its_own_data_alone(run, images):
    assert resume(run).checkpoint.finished
    replace(images / "test" / "b" / "31.bmp")
    with pytest.raises(UserError, match=f"the test set {OTHERS}"):
        write_evaluation(run)
    assert not (run / "evaluation.csv").exists()
    assert "have changed since the run began: the test set no longer has" in write_report([run]).read_text()
