"""Reading and writing files: a CSV file there and back, and what is told where a file cannot be written."""

from __future__ import annotations

import errno
import os

import pytest

from fedssl.errors import UserError
from fedssl.storage import csv_text, make_folder, read_csv, write_atomically
from fedssl.untrusted.printable import printable

ROWS = [["who", "what"], ["0", 'a, "b"'], ["1", "é"]]


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "file.csv"
    write_atomically(path, csv_text(ROWS).encode())
    assert read_csv(path) == [{"who": "0", "what": 'a, "b"'}, {"who": "1", "what": "é"}]
    assert read_csv(tmp_path / "absent.csv") == []


def test_what_is_beyond_the_length_or_not_a_whole_line_is_left_out(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text("who,what\n0,a\n1,b\n2,c")
    assert [row["who"] for row in read_csv(path)] == ["0", "1"]
    assert [row["who"] for row in read_csv(path, len("who,what\n0,a\n"))] == ["0"]
    assert [row["who"] for row in read_csv(path, len("who,what\n0,a\n1,"))] == ["0"]
    assert read_csv(path, 0) == []


@pytest.mark.parametrize("name", ["a\rb", "a\nb", "a\r\nb", "\x1b[31m", "a\0b", "\ud800", '"', ","])
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


def test_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/a cannot be written: Not a directory"):
        write_atomically(tmp_path / "file" / "a", b"")


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

    monkeypatch.setattr("fedssl.storage.os.fsync", fail)
    with pytest.raises(UserError, match=message):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_below_a_file_cannot_be_made(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/b cannot be written"):
        make_folder(tmp_path / "file" / "b")
