"""The command line, called in this process."""

from __future__ import annotations

import sys

import pytest

from fedssl.cli import main


@pytest.fixture
def fedssl(monkeypatch, capsys, tmp_path):
    """Call `fedssl` in an empty folder at a width in columns; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, columns: int = 200) -> tuple[int, str, str]:
        for variable in ("COLUMNS", "TERMINAL_WIDTH"):
            monkeypatch.setenv(variable, str(columns))
        monkeypatch.setattr(sys, "argv", ["fedssl", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call
