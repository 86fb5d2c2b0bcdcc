"""Reading and writing files: a CSV file there and back, and what is told where a file cannot be written."""

from __future__ import annotations

import errno
import os

import pytest

from fedssl.errors import UserError
from fedssl.storage import csv_text, make_folder, read_csv, write_atomically

ROWS = [["who", "what"], ["0", 'a, "b"\nc'], ["1", "é"]]


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "file.csv"
    write_atomically(path, csv_text(ROWS).encode())
    assert read_csv(path) == [{"who": "0", "what": 'a, "b"\nc'}, {"who": "1", "what": "é"}]
    assert read_csv(tmp_path / "absent.csv") == []


def test_what_is_beyond_the_length_or_not_a_whole_line_is_left_out(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text("who,what\n0,a\n1,b\n2,c")
    assert [row["who"] for row in read_csv(path)] == ["0", "1"]
    assert [row["who"] for row in read_csv(path, len("who,what\n0,a\n"))] == ["0"]
    assert [row["who"] for row in read_csv(path, len("who,what\n0,a\n1,"))] == ["0"]
    assert read_csv(path, 0) == []


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
