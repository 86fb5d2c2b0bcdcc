"""The command line, called in this process."""

from __future__ import annotations

import sys

import pytest

from fedssl.cli import main


@pytest.fixture
def fedssl(monkeypatch, capsys, tmp_path):
    """Call `fedssl` with arguments in an empty folder; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedssl", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call
