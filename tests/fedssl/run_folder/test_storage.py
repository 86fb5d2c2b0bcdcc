"""Reading and writing files: a CSV file there and back, and the error if a file cannot be written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from fedssl.errors import UserError
from fedssl.messages import Message
from fedssl.run_folder.storage import (
    csv_text,
    flush_files,
    make_folder,
    read_csv,
    read_message,
    remove_files,
    write_atomically,
    write_message,
)
from fedssl.untrusted import printable
from tests.fedssl.engines.every_tensor import assert_same, every_kind_of_tensor


@pytest.mark.parametrize(
    ("length", "read"),
    [(None, ["0", "1"]), (len("who,what\n0,a\n"), ["0"]), (len("who,what\n0,a\n1,"), ["0"]), (0, [])],
)
def test_what_is_beyond_the_length_or_not_a_whole_line_is_left_out(length, read, tmp_path):
    (tmp_path / "file.csv").write_text("who,what\n0,a\n1,b\n2,c")
    assert [row["who"] for row in read_csv(tmp_path / "file.csv", length)] == read


@pytest.mark.parametrize("name", ['a, "b"', "é", "a\rb", "a\nb", "a\r\nb", "\x1b[31m", "a\0b", "\ud800", '"', ","])
def test_a_name_of_unknown_origin_stays_one_cell_of_one_line(name, tmp_path):
    path = tmp_path / "file.csv"
    write_atomically(path, csv_text([["who", name], [name, "1"]]).encode())
    lines = path.read_bytes().decode().split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert read_csv(path) == [{"who": printable(name), printable(name): "1"}]


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
    ("number", "message"),
    [
        (errno.ENOSPC, "no space left to write .*file: free some space"),
        (errno.EIO, "file cannot be written: Input/out"),
    ],
)
def test_a_write_that_fails_keeps_the_old_file(number, message, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match=message):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_below_a_file_cannot_be_written(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/b cannot be written"):
        make_folder(tmp_path / "file" / "b")
    with pytest.raises(UserError, match="file/a cannot be written: Not a directory"):
        write_atomically(tmp_path / "file" / "a", b"")


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
    path_of = "/proc/self/fd/{}".format
    monkeypatch.setattr("os.fsync", lambda handle: flushed.append(os.readlink(path_of(handle))))
    flush_files(tmp_path, names)
    assert sorted(flushed[:-1]) == sorted(str(tmp_path / name) for name in names)
    assert flushed[-1] == str(tmp_path)
    with pytest.raises(UserError, match="absent cannot be written: No such file"):
        flush_files(tmp_path, [*names, "absent"])


def test_files_are_removed_and_others_stay(tmp_path):
    for name in ("a", "b", "kept"):
        (tmp_path / name).write_text(name)
    remove_files(tmp_path, ["a", "b", "absent"])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        remove_files(tmp_path, ["folder", "kept"])
