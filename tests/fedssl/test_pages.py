"""What the README and the pages of docs/ show works as written."""

import itertools
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from fedssl.cli import app
from fedssl.engines import pace
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.recipe.reading import load_recipe, parse_recipe
from tests.fedssl.conftest import tiny_values
from tests.fedssl.data.data_files import random_pixels, write_image
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.short_runs import SMALL

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "methods.md", DOCS / "demo.md", DOCS / "add_a_method.md"]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
#: what makes the runs of a page short; the page's own settings stay
SHORT = ("rounds=1", "training.local_epochs=1", "training.batch_size=16", "evaluation.linear.epochs=2")


def block(start: str) -> str:
    return next(code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if start in code)


@pytest.fixture
def fedssl_prints(fedssl, few_neighbours, monkeypatch):
    """Run a command in an empty folder; return what it prints."""
    monkeypatch.setattr(pace, "SECONDS", 0.01)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "load", raising=False)

    def prints(words: list[str]) -> str:
        code, out, err = fedssl(*words[1:], columns=80)
        assert code == 0, (words, err)
        return out

    return prints


def take_steps(page: str, fedssl_prints, *settings: str) -> tuple[int, int]:
    """Take a page's steps in its order, with short runs; return how many blocks of Python and commands they are."""
    text = (DOCS / page).read_text(encoding="utf-8")
    steps = re.findall(r"```python\n(.*?)```|^    (fedssl .*?[^\\])$", text, re.DOTALL | re.MULTILINE)
    for code, command in steps:
        if code:
            exec(code, {})
            continue
        words = shlex.split(re.sub(r"\\\n\s*", "", command))
        if words[1] in ("run", "pretrain"):
            words = [*words[:3], *(word for word in words[3:] if not word.startswith("rounds=")), *SHORT, *settings]
        if "--minutes" in words:
            place = words.index("--minutes")
            words = words[:place] + words[place + 2 :]
        if "--fine-tune" in words:  # forty epochs of RandAugment: checked elsewhere
            words = words[: words.index("--fine-tune")]
        fedssl_prints(words)
    return len([code for code, _ in steps if code]), len([command for _, command in steps if command])


@pytest.mark.parametrize(
    "page",
    sorted([ROOT / "README.md", *DOCS.glob("*.md"), *ROOT.glob("notebooks/*.ipynb")]),
    ids=lambda page: page.name,
)
def test_every_link_to_a_file_has_one(page):
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        text = target.read_text(encoding="utf-8") if anchor else ""
        if "<!-- generated" not in text:  # of a generated heading the site's build tells
            headings = re.findall(r"^(?:#+|:::) (.+)$", text, re.MULTILINE)
            kept = r"[^\w\s.-]" if "." in anchor else r"[^\w\s-]"
            slugs = {re.sub(kept, "", title.lower()).replace(" ", "-") for title in headings}
            assert not anchor or anchor.lower() in slugs, f"{link}#{anchor}"


def test_the_parts_of_the_docs_run(tmp_path):
    paths = {name: tmp_path / f"{name}.py" for name in ("Variance", "Turned", "Median", "WarmThenLast")}
    for name, path in paths.items():
        path.write_text(block(f"class {name}"))
    own, turned, median, last = map(str, paths.values())
    values = {"regularizers": [{"name": own, "weight": 2.0}], "augmentation": {"name": turned, "brightness": 0.1}}
    values |= SMALL | {"aggregators": [median], "local_update": "replace", "schedule": last}
    rows = run(parse_recipe(tiny_values(**values)), tmp_path / "run").read_metrics()
    assert len([row for row in rows if row[2] == "deviation" and row[1] == "0"]) == 2
    total, loss = (next(v for _, who, m, v in rows if m == name and who == "0") for name in ("total_loss", "loss"))
    assert total > loss
    with pytest.raises(UserError, match=r"regularizers.0.weigth: unknown key; did you mean weight\?"):
        parse_recipe(tiny_values(regularizers=[{"name": own, "weigth": 2.0}]))


def test_the_operator_example_runs():
    exec(block("from fedkernels import"), {})


def test_every_command_of_the_readme_is_one_that_exists_and_every_override_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (*(f"my_images/{number}.png" for number in range(20)), "photos/0.png"):
        write_image(Path(path), 0)
    np.savez("mine.npz", x_train=np.zeros((90, 32, 32, 3), np.uint8), y_train=np.arange(90) % 3)
    lines = re.sub(r"\\\n\s*", "", TEXT).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if re.match(r"\s+fedssl [a-z]", line)]
    assert len(commands) >= 7
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    for command in commands:
        assert command[1] in known
        if command[1] in ("run", "partition") and not command[2].startswith("--"):
            words = itertools.takewhile(lambda word: not word.startswith("--"), command[3:])
            overrides = [word for word in words if "={name: ./" not in word and "=[{name: ./" not in word]
            load_recipe(command[2], overrides)


def test_every_step_of_start_works_in_the_pages_order(fedssl_prints, capsys):
    assert take_steps("start.md", fedssl_prints, "architectures=[small_convnet]") == (2, 4)
    assert Path("runs/first/report.html").exists()
    assert "most like the first image" in capsys.readouterr().out


def test_every_step_of_own_images_works_in_the_pages_order(fedssl_prints):
    """On a small folder of images without labels."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    for number in range(60):
        folder = Path("photos" if number % 2 else "photos/older")
        save_array(folder / f"{number:02}.png", random_pixels(32, 40, 3, seed=number))
    images = {"x_train": random_pixels(40, 28, 28), "x_test": random_pixels(20, 28, 28, seed=1)}
    np.savez("labelled.npz", **images, y_train=np.arange(40) % 2, y_test=np.arange(20) % 2)

    code, commands = take_steps("own_images.md", fedssl_prints)
    assert (code, commands >= 9) == (3, True)
    assert "Images as the encoder sees them" in Path("runs/photos/report.html").read_text()
    assert "downstream_mine_knn" in Path("runs/measured/metrics.csv").read_text()
    with np.load("features.npz") as features:
        assert features["features"].shape == (60, 512)
        assert "older/00.png" in features["files"]


def test_how_long_will_my_run_take_prints_what_the_page_shows(tmp_path, fedssl_prints):
    """docs/speed.md: its table file and its commands, as they stand."""
    section = (DOCS / "speed.md").read_text(encoding="utf-8").partition("## How long will my run take")[2]
    (table,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    Path("mine.yaml").write_text(table)
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^    (fedssl .*)", section, re.MULTILINE)]
    assert [command[1] for command in commands] == ["run-table", "cost"]
    lines = [re.split(r"\s{2,}", line.strip()) for line in fedssl_prints(commands[0]).splitlines()]
    fedssl_prints(commands[1])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]

    header, row = (re.search(rf"^ *({start}.*)", section, re.MULTILINE)[1] for start in ("row  ", "mine  "))
    assert re.split(r"\s{2,}", header.strip()) in lines
    *counted, _ = re.split(r"\s{2,}", row.strip())  # the hours are another machine's
    assert counted in [line[:-1] for line in lines]
