"""docs/speed.md, "How long will my run take": its table file and its commands, as they stand."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from fedssl.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## How long will my run take")[2]


def words_of(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_the_commands_tell_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (table,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
    Path("mine.yaml").write_text(table)
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^    (fedssl .*)", SECTION, re.MULTILINE)]
    assert [command[1] for command in commands] == ["run-table", "cost"]
    printed = []
    for command in commands:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == 0
        printed.append(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]

    header, row = (re.search(rf"^ *({start}.*)", SECTION, re.MULTILINE)[1] for start in ("row  ", "mine  "))
    assert words_of(header) in [words_of(line) for line in printed[0].splitlines()]
    *counted, _ = words_of(row)  # the hours are another machine's
    assert counted in [words_of(line)[:-1] for line in printed[0].splitlines()]
