"""The site: its figures' numbers, computed again without the operators that made them, its notebooks, and a browser."""

import json
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch

from fedkernels.reference.unbalanced_ot import unbalanced_ot
from fedssl.recipe.reading import parse_recipe
from fedssl.reports.report import write_report
from tests.fedssl.conftest import tiny_values
from tests.fedssl.reports.synthetic_runs import evaluated, write_run
from website import check_in_browser, figures, notebooks
from website.figures import cka, eua, fur, what_travels
from website.methods import PAGES
from website.repository_files import ROOT


def data_of(name):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', figures.html(name), re.DOTALL)[1])


@pytest.mark.parametrize("name", sorted(figures.DRAWINGS))
def test_a_figure_is_described_and_has_no_blank_line(name):
    html = figures.html(name)
    assert re.search(r'<svg [^>]*role="img"[^>]*aria-label="[^"]{40,}"', html)
    assert not re.search(r"\n\s*\n", html)
    assert "$" not in html  # the site would take it for an equation


def test_cka_is_that_of_the_points_that_the_script_draws():
    data, index = data_of("cka"), 0
    x, other = np.array(data["x"]), np.array(data["other"])
    for turn in np.radians(data["turns"]):
        for scale in data["scales"]:
            for share in data["shares"]:
                mixed = (1 - share) * x + share * other
                cosine, sine = scale * math.cos(turn), scale * math.sin(turn)
                y = np.stack([cosine * mixed[:, 0] - sine * mixed[:, 1], sine * mixed[:, 0] + cosine * mixed[:, 1]], 1)
                a, b = x - x.mean(0), y - y.mean(0)
                expected = np.linalg.norm(b.T @ a) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
                assert data["cka"][index] == pytest.approx(expected, abs=6e-4)
                assert data["distance"][index] == pytest.approx(np.linalg.norm(x - y, axis=1).mean(), abs=6e-4)
                index += 1
    assert index == len(data["cka"]) == len(cka.TURNS) * len(cka.SCALES) * len(cka.SHARES)


def test_eua_has_the_shortest_combination():
    data, index = data_of("eua"), 0
    grid = np.linspace(0, 1, 2001)[:, None]
    for angle in eua.ANGLES:
        for length in eua.LENGTHS:
            deltas = eua.updates(angle, length).numpy()
            for power in (2, 1):  # squared_length, length
                gradients = deltas / np.linalg.norm(deltas, axis=1, keepdims=True) ** power
                p = np.array(data["p"][index])
                least = np.linalg.norm(grid * gradients[0] + (1 - grid) * gradients[1], axis=1).min()
                assert np.linalg.norm(p @ gradients) <= least + 3e-3
                assert p.sum() == pytest.approx(1, abs=2e-3)
                assert (p >= 0).all()
                index += 1
    assert index == len(data["p"]) == len(data["shares"])


def test_the_first_step_of_fur_is_the_terms_value_and_the_points_spread():
    positions, values, _ = fur.flow()
    samples = torch.nn.functional.normalize(
        torch.randn(32 * fur.POINTS, 3, generator=torch.Generator().manual_seed(0)), dim=1
    ).view(32, fur.POINTS, 3)
    ones = torch.ones(32, fur.POINTS)
    cost = 1 - positions[0] @ samples.mT
    expected = unbalanced_ot(cost, ones, ones, 0.8, 0.8).mean() / fur.POINTS
    assert float(values[0]) == pytest.approx(float(expected), rel=1e-3)
    lengths = positions.mean(dim=1).norm(dim=-1)
    assert (lengths.diff() < 0).all()
    assert data_of("fur")["resultant"][-1] == pytest.approx(float(lengths[-1]), abs=6e-4)


def test_every_method_is_in_one_family_of_what_travels():
    shown = [recipe for recipes in what_travels.families().values() for recipe in recipes]
    assert sorted(shown) == sorted(PAGES)


def test_the_stages_are_the_schedules_own():
    html = figures.html("stages")
    assert "LW-FedSSL, stage 3: layer 1 frozen, layer 2 frozen, layer 3 trains" in html
    assert "Prog-FedSSL, stage 3: layer 1 trains, layer 2 trains, layer 3 trains" in html


# ---- notebooks: every cell runs, and the pages show what was stored ----


@pytest.mark.parametrize(
    "name",
    [
        "one_loss",
        pytest.param("four_hospitals", marks=pytest.mark.nightly),  # three runs of five clients: a minute
    ],
)
def test_every_cell_runs(name, capsys):
    matplotlib.use("agg")
    names = {"__name__": "__main__"}
    for cell in notebooks.cells(notebooks.FOLDER / f"{name}.ipynb"):
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], name, "exec"), names)
    printed = capsys.readouterr().out
    if name == "one_loss":
        formula, operator = (line.split()[-1] for line in printed.splitlines()[:2])
        assert float(formula) == pytest.approx(float(operator), rel=1e-5)
    else:
        together, alone = names["means"][1], names["means"][2]
        assert together > alone  # as the notebook's text says


def test_a_page_has_the_stored_outputs_and_described_pictures():
    assert sorted(path.stem for path in notebooks.FOLDER.glob("*.ipynb")) == ["four_hospitals", "one_loss"]
    page = notebooks.page("four_hospitals")
    assert '<img alt="kNN accuracy of each department' in page
    assert "West, lungs  small_resnet18" in page
    assert "](../docs/" not in page


def test_a_cell_that_was_not_run_is_refused(tmp_path, monkeypatch):
    text = (notebooks.FOLDER / "one_loss.ipynb").read_text(encoding="utf-8")
    (tmp_path / "one_loss.ipynb").write_text(text.replace('"execution_count": 1', '"execution_count": null'))
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"was not run: run python -m website\.notebooks"):
        notebooks.page("one_loss")


# ---- the site and a report in a headless browser: needs the extras docs and browser ----


def write_pages(folder: Path) -> list[Path]:
    """A report of two runs, with made-up figures."""
    for name, after in (("ours", 60.0), ("alone", 50.0)):
        rows = evaluated(0, "knn", [40.0, 42.0]) + evaluated(1, "loss", [2.0, 3.0]) + evaluated(2, "knn", [after, 51.0])
        write_run(folder / name, parse_recipe(tiny_values(name=name)), rows, counts=[[30, 10], [0, 20]])
    return [write_report([folder / "ours", folder / "alone"], folder / "page.html", collapse=False, images=False)]


@pytest.mark.nightly  # minutes: ten pages, two widths, two themes
def test_no_page_has_a_problem(tmp_path):
    if find_spec("mkdocs") is None:
        pytest.skip("needs pip install '.[docs,browser]'")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=ROOT, check=True)
    if reason := check_in_browser.missing():
        pytest.skip(reason)
    assert check_in_browser.main([str(page) for page in write_pages(tmp_path)]) == 0
