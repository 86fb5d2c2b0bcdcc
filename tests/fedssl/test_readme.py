"""What the README and the pages of docs/ show works as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.cli import app
from fedssl.engines.in_process import run
from fedssl.recipe.reading import load_recipe, parse_recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, tiny_values

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "methods.md", ROOT / "docs" / "demo.md", ROOT / "docs" / "add_a_method.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def block(start: str) -> str:
    return next(code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if start in code)


def test_the_readme_is_short():
    assert len(PAGES[0].read_text(encoding="utf-8").split()) <= 1300


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.name
)
def test_every_link_to_a_file_has_one(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_regularizer_of_the_docs_is_under_60_lines_and_runs(tmp_path):
    code = block("class Variance")
    assert len(code.splitlines()) < 60
    part = tmp_path / "variance.py"
    part.write_text(code)
    regularizer = {"name": str(part), "weight": 2.0}
    run(parse_recipe(tiny_values(**AVERAGED, regularizers=[regularizer])), tmp_path / "run")
    rows = RunDirectory.open(tmp_path / "run").read_metrics()
    assert len([row for row in rows if row[2] == "deviation" and row[1] == "0"]) == 2
    total, loss = (next(v for _, who, m, v in rows if m == name and who == "0") for name in ("total_loss", "loss"))
    assert total > loss


def test_the_augmentation_of_the_docs_is_under_60_lines_and_runs(tmp_path):
    code = block("class Turned")
    assert len(code.splitlines()) < 60
    part = tmp_path / "turned.py"
    part.write_text(code)
    run(parse_recipe(tiny_values(**AVERAGED, augmentation={"name": str(part), "brightness": 0.1})), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.csv").exists()


def test_a_wrong_option_of_an_own_part_is_refused(tmp_path):
    part = tmp_path / "variance.py"
    part.write_text(block("class Variance"))
    with pytest.raises(Exception, match=r"regularizers.0.weigth: unknown key; did you mean weight\?"):
        parse_recipe(tiny_values(regularizers=[{"name": str(part), "weigth": 2.0}]))


def test_the_operator_example_runs():
    exec(block("from fedkernels import"), {})


def test_every_command_of_the_readme_is_one_that_exists_and_every_override_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_images").mkdir()
    for i in range(20):
        Image.new("RGB", (40, 40)).save(tmp_path / "my_images" / f"{i}.png")
    np.savez("mine.npz", x_train=np.zeros((90, 32, 32, 3), np.uint8), y_train=np.arange(90) % 3)
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save("photos/one.png")
    lines = re.sub(r"\\\n\s*", "", TEXT).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if re.match(r"\s+fedssl [a-z]", line)]
    assert len(commands) >= 7
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    for command in commands:
        assert command[1] in known
        if command[1] in ("run", "partition"):
            overrides = [word for word in command[3:] if "={name: ./" not in word and "=[{name: ./" not in word]
            load_recipe(command[2], overrides)
