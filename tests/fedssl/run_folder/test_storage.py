"""Reading and writing files: a CSV file there and back, and the error if a file cannot be written."""

import errno
import hashlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from fedssl.errors import UserError
from fedssl.messages import Message
from fedssl.run_folder import directory
from fedssl.run_folder.directory import RunDirectory, client_file
from fedssl.run_folder.record import Run, read_run
from fedssl.run_folder.storage import (
    csv_text,
    flush_files,
    read_csv,
    read_message,
    remove_files,
    write_atomically,
    write_message,
)
from fedssl.untrusted import printable
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.engines.every_tensor import assert_same, every_kind_of_tensor
from tests.fedssl.reports.synthetic_runs import evaluated, write_run


@pytest.mark.parametrize(
    ("length", "read"),
    [(None, ["0", "1"]), (len("who,what\n0,a\n"), ["0"]), (len("who,what\n0,a\n1,"), ["0"]), (0, [])],
)
def test_what_is_beyond_the_length_or_not_a_whole_line_is_left_out(length, read, tmp_path):
    (tmp_path / "file.csv").write_text("who,what\n0,a\n1,b\n2,c")
    assert [row["who"] for row in read_csv(tmp_path / "file.csv", length)] == read


@pytest.mark.parametrize("name", ['a, "b"', "é", "a\rb", "a\nb", "\x1b[31m", "a\0b", "\ud800"])
def test_a_name_of_unknown_origin_stays_one_cell_of_one_line(name, tmp_path):
    path = tmp_path / "file.csv"
    write_atomically(path, csv_text([["who", name], [name, "1"]]).encode())
    lines = path.read_bytes().decode().split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert read_csv(path) == [{"who": printable(name), printable(name): "1"}]


def test_a_text_that_a_spreadsheet_would_compute_is_kept_from_it_and_read_as_it_was(tmp_path):
    formulas = ["=who", "=HYPERLINK(1)", "+1+1", "-a", "@SUM(A1)", "'=1+1", "=\x1b"]
    plain = ["'a", "-", "-1.5", "+1e-3", "-inf", "a=b"]
    (tmp_path / "file.csv").write_text(text := csv_text([one, "1"] for one in formulas + plain))
    assert text.splitlines() == [*(f"'{printable(one)},1" for one in formulas), *(f"{one},1" for one in plain)]
    header, *read = map(printable, formulas + plain)
    assert [row[header] for row in read_csv(tmp_path / "file.csv")] == read


@pytest.mark.parametrize(
    "text", ["a,b\n1\n", "a,b\n1,2,3\n", 'a,b\n"1,2\n', "a,b\n1\r2,3\n", "a\n" + "x" * 200_000 + "\n"]
)
def test_a_damaged_csv_file_is_a_value_error(text, tmp_path):
    (tmp_path / "file.csv").write_bytes(text.encode())
    with pytest.raises(ValueError, match=r"cells|field|new-line|unexpected end"):
        read_csv(tmp_path / "file.csv")


def test_a_temporary_file_that_is_a_link_is_not_followed(tmp_path):
    """A received folder could hold report.html.partial as a link to a file of the user's."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "file.partial").symlink_to("precious")
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "no space left to write .*file: free"), (errno.EIO, "cannot be written: In")]
)
def test_a_write_that_fails_keeps_the_old_file(number, message, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=message):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_message_is_read_as_it_was_written_also_by_the_library(tmp_path):
    message, path = every_kind_of_tensor(), tmp_path / "state.safetensors"
    message.tensors["complex"] = torch.tensor([1 + 2j])
    digest = write_message(path, message)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    read = read_message(path)
    assert_same(read, message)
    assert_same(replace(read, tensors=load_file(path)), message)
    assert all(tensor.is_contiguous() for tensor in read.tensors.values())


def test_tensors_in_a_file_are_aligned_and_in_one_order(tmp_path):
    message = every_kind_of_tensor()
    backwards = Message(dict(reversed(message.tensors.items())), message.numbers, message.config, message.metrics)
    digests = {write_message(tmp_path / "state", one, flush=False) for one in (message, backwards)}
    assert len(digests) == 1
    data = (tmp_path / "state").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__").keys() == {"message"}
    for name, entry in header.items():
        assert entry["data_offsets"][0] % message.tensors[name].element_size() == 0, name


def test_all_files_are_flushed_and_their_folder_last(tmp_path, monkeypatch):
    names = [f"{number}" for number in range(40)]
    for name in names:
        (tmp_path / name).write_text(name)
    flushed = []
    monkeypatch.setattr("os.fsync", lambda handle: flushed.append(os.readlink(f"/proc/self/fd/{handle}")))
    flush_files(tmp_path, names)
    assert sorted(flushed[:-1]) == sorted(str(tmp_path / name) for name in names)
    assert flushed[-1] == str(tmp_path)
    with pytest.raises(UserError, match="absent cannot be written: No such file"):
        flush_files(tmp_path, [*names, "absent"])


def test_ctrl_c_waits_for_the_files_that_are_flushed(tmp_path, monkeypatch):
    flushed = []

    def sync(path):
        flushed.append(path)
        if len(flushed) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    monkeypatch.setattr("fedssl.run_folder.storage.sync_path", sync)
    with pytest.raises(KeyboardInterrupt):
        flush_files(tmp_path, map(str, range(40)))
    assert len(flushed) == 40


def test_files_are_removed_and_others_stay(tmp_path):
    for name in ("a", "b", "kept"):
        (tmp_path / name).write_text(name)
    remove_files(tmp_path, ["a", "b", "absent"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        remove_files(tmp_path, ["folder", "kept"])


# A run read back from its folder: which value each method gives, and what counts of a folder that was cut short


@pytest.fixture
def finished(tiny, tmp_path) -> Run:
    """Two clients of two architectures over two rounds; the last round also has a global model."""
    rows = [*evaluated(0, "knn", [40.0, 42.0]), (1, "0", "bytes_up", 100.0), (2, "1", "bytes_up", 50.0)]
    rows += [*evaluated(2, "knn", [50.0, 54.0]), (2, "global", "knn", 60.0), (2, "mean", "bytes_up", 75.0)]
    counts = [[3, 0], [1, 2]]
    write_run(tmp_path / "a", tiny(**ALIGNED, seed=3), rows, counts=counts)
    return read_run(str(tmp_path / "a"))


def test_a_run_has_what_its_folder_holds(finished, tmp_path):
    assert (finished.path, finished.name, finished.seed) == (tmp_path / "a", "tiny", 3)
    assert (finished.rounds, finished.last_round, finished.finished) == (2, 2, True)
    assert list(finished.class_names) == ["cat", "dog"]
    assert finished.class_counts == [[3, 0], [1, 2]]
    assert finished.values[2, "1", "knn"] == 54.0
    assert [finished.architecture_of(k) for k in range(3)] == ["small_convnet", "small_convnet_wide", "small_convnet"]
    # the global model stands for the run, and otherwise the mean
    assert finished.overall("knn") == {0: 41.0, 2: 60.0}
    assert finished.overall("no such metric") == {}
    assert finished.evaluated("knn", "before") == 41.0
    assert finished.evaluated("knn", "after") == 60.0
    assert finished.evaluated("knn", "after", "0") == 50.0
    assert finished.evaluated("knn", "after", "7") is None
    assert finished.total("bytes_up") == 150.0  # over rounds and clients, without the mean
    with pytest.raises(ValueError, match="when must be 'before' or 'after', got 'later'"):
        finished.evaluated("knn", "later")


def test_what_a_killed_run_wrote_after_its_last_commit_does_not_count(tiny, tmp_path):
    """And it has no value after training; without checkpoints, as in a copy, all whole lines count."""
    path = tmp_path / "a"
    directory = write_run(path, tiny(), evaluated(0, "knn", [40.0]) + evaluated(1, "knn", [45.0]))
    directory.append_metrics(evaluated(2, "knn", [50.0]))
    with open(path / "metrics.csv", "a") as file:
        file.write("2,0,torn")
    run = read_run(path)
    assert (run.finished, run.last_round) == (False, 1)
    assert run.overall("knn") == {0: 40.0, 1: 45.0}
    assert (run.evaluated("knn", "before"), run.evaluated("knn", "after")) == (40.0, None)
    (path / "checkpoints" / "manifest.json").unlink()
    assert read_run(path).evaluated("knn", "after") == 50.0
    (path / "metrics.csv").unlink()
    run = read_run(path)
    assert (run.last_round, run.values, run.class_counts) == (-1, {}, [])


def test_states_that_simulated_clients_wrote_count_as_large_and_have_digests(tmp_path, monkeypatch):
    """As those that this process writes: by default one round of large states is kept."""
    monkeypatch.setattr(directory, "LARGE", 1000)
    run = RunDirectory.create(tmp_path / "run", {"recipe.yaml": "name: a"})
    for number in (0, 1):
        digest = write_message(run.checkpoints / client_file(0, number), Message({"w": torch.zeros(1000)}))
        run.adopt_client(0, number)
        run.commit(number, Message(), finished=False, keep=None)
        assert run.checkpoint.digests[client_file(0, number)] == digest
    assert run.checkpoint.earlier == []


ALL, END = "(?s).*", r"\Z"  # of a file's text


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("recipe.yaml", ALL, "- 1\n", "cannot be read as a run's folder .*`name` or `rounds` is missing"),
        ("recipe.yaml", ALL, "{", "recipe.yaml is not YAML"),
        ("recipe.yaml", "name: tiny", 'name: "a\\e[2J"', "control characters"),
        ("recipe.yaml", "name: tiny", "name: [1]", "`name` must be"),
        ("recipe.yaml", "rounds: 2", "rounds: many", "`rounds` must be a whole number from 1, got 'many'"),
        ("recipe.yaml", "rounds: 2", "rounds: true", "`rounds` must be a whole number"),
        ("recipe.yaml", "seed: 3", "seed: -1", "`seed` must be a whole number from 0"),
        ("partition.csv", ALL, "client,cat\n0,many\n", "cannot be read as a run's folder .*'many'"),
        ("metrics.csv", ALL, "round,client,value\n1,0,3.5\n", r"cannot be read \('metric'\); expected the columns"),
        ("partition.csv", END, "9,-1,0\n", "cannot be read as a run's folder"),
        ("partition.csv", END, f"9,1,{10**30}\n", "cannot be read as a run's folder"),
        ("timings.csv", END, "1,inf\n", "cannot be read as a run's folder"),
        ("timings.csv", END, "2,-1\n", "cannot be read as a run's folder"),
        ("metrics.csv", END, "1,²,knn,3\n", "metrics.csv cannot be read"),
        ("metrics.csv", END, "1,../x,knn,3\n", "metrics.csv cannot be read"),
        ("metrics.csv", END, "²,0,knn,3\n", "metrics.csv cannot be read"),
        ("metrics.csv", END, "-1,0,knn,3\n", "metrics.csv cannot be read"),
        ("metrics.csv", END, f"1,{'9' * 5000},k,3\n", "metrics.csv cannot be read"),
    ],
)
def test_what_no_run_writes_is_told_in_one_line(file, old, new, message, finished):
    """In a received folder, whose manifest holds no lengths."""
    (finished.path / "timings.csv").write_text("round,seconds\n")
    path = finished.path / file
    path.write_text(re.sub(old, lambda _: new, path.read_text(), count=1))
    if path.suffix == ".csv":
        (finished.path / "checkpoints" / "manifest.json").unlink()
    with pytest.raises(UserError, match=message) as error:
        read_run(finished.path)
    assert str(error.value).isprintable()
