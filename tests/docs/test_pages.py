"""Start works from its first line to its last, and so do the parts of Add a method."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from fedssl.cli import main
from fedssl.engines.in_process import run
from fedssl.recipe.reading import parse_recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, tiny_values
from website.repository_files import ROOT, rewrite_links

DOCS = ROOT / "docs"
SHORT = ("rounds=1", "training.local_epochs=1", "training.batch_size=32", "evaluation.linear.epochs=2")


def test_every_step_of_start_works_in_the_pages_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "start.md").read_text(encoding="utf-8")
    steps = re.findall(r"```python\n(.*?)```|^    (fedssl .*?)$", page, re.DOTALL | re.MULTILINE)
    assert len(steps) == 6
    for code, command in steps:
        if code:
            exec(code, {})
            continue
        words = shlex.split(command)
        if words[1] == "run":
            words = [*(word for word in words if not word.startswith("rounds=")), *SHORT]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == 0, (command, capsys.readouterr().err)
    assert Path("runs/photos/report.html").exists()
    assert "most like the first image" in capsys.readouterr().out


@pytest.mark.parametrize(("title", "key"), [("Median", "aggregators"), ("WarmThenLast", "schedule")])
def test_the_parts_of_add_a_method_run(title, key, tmp_path):
    page = (DOCS / "add_a_method.md").read_text(encoding="utf-8")
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {title}" in code)
    part = tmp_path / f"{title.lower()}.py"
    part.write_text(code)
    own = {"name": str(part)}
    run(parse_recipe(tiny_values(**AVERAGED | {key: [own] if key == "aggregators" else own})), tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").read_metrics()


def test_a_link_to_nothing_is_refused():
    with pytest.raises(FileNotFoundError, match=r"docs/start.md links to nothing.md, but docs/nothing.md"):
        rewrite_links("[x](nothing.md)", "start.md")


def source_texts():
    """Every string of the packages' sources, with ... for what an f-string fills in."""
    for path in (path for package in ("fedssl", "fedkernels") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_errors_that_questions_explains_are_the_sources_own():
    page = (DOCS / "questions.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\*\*`(.+?)`\*\*", page, re.MULTILINE)
    assert len(quoted) == 10
    texts = list(source_texts())
    for quote in quoted:
        # "supervised" stands for the objective's name; the sources have a place to fill in there.
        wanted = re.escape(quote.replace("supervised", "...")).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(wanted, text, re.DOTALL) for text in texts), quote
