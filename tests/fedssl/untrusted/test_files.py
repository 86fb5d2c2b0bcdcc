"""Files and paths from somebody else: a pipe does not hang, an unknown home is an error."""

from __future__ import annotations

import os

import pytest

from fedssl.errors import UserError
from fedssl.untrusted import absolute_path, expand_home, read_regular_file


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link", most_bytes=3) == b"abc"
    with pytest.raises(OSError, match="expected at most 2 bytes, the file has 3"):
        read_regular_file(tmp_path / "file", most_bytes=2)


def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="expected a regular file"):
            read_regular_file(path)


def test_paths_that_lead_nowhere_are_errors(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for call in (lambda: expand_home("~nosuchuser/a"), lambda: absolute_path(tmp_path, "~nosuchuser/a")):
        with pytest.raises(UserError, match="'~nosuchuser/a' begins with an unknown user's home folder"):
            call()
    assert absolute_path(tmp_path, "b/../c") == tmp_path / "c"
