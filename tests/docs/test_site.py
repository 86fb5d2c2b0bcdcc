"""The site's drawings, computed again without the operators that made them, and its notebooks."""

import json
import math
import re

import matplotlib
import numpy as np
import pytest

from fedssl.schedules.layer_wise import LayerWise
from fedssl.schedules.progressive import Progressive
from website import methods
from website.generated import figure
from website.repository_files import ROOT, markdown_of

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELLS = {path.stem: json.loads(path.read_text(encoding="utf-8"))["cells"] for path in NOTEBOOKS}
LAYERS = 4


def data_of(name):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', figure(name), re.DOTALL)[1])


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
    assert index == len(data["cka"])


def test_eua_has_the_shortest_combination():
    data, index = data_of("eua"), 0
    grid = np.linspace(0, 1, 2001)[:, None]
    for angle in data["angles"]:
        for length in data["lengths"]:
            clients = np.array([data["first"], (angle, length)])
            directions = np.radians(clients[:, 0])
            deltas = clients[:, 1:] * np.stack([np.cos(directions), np.sin(directions)], 1)
            for power in (2, 1):  # squared_length, length
                gradients = deltas / np.linalg.norm(deltas, axis=1, keepdims=True) ** power
                p = np.array(data["p"][index])
                least = np.linalg.norm(grid * gradients[0] + (1 - grid) * gradients[1], axis=1).min()
                assert np.linalg.norm(p @ gradients) <= least + 3e-3
                assert p.sum() == pytest.approx(1, abs=2e-3)
                assert (p >= 0).all()
                index += 1
    assert index == len(data["p"]) == len(data["shares"])


def test_the_points_of_fur_spread_and_its_term_falls():
    data = data_of("fur")
    assert np.allclose(np.linalg.norm(np.mean(data["positions"], axis=1), axis=1), data["resultant"], atol=0.01)
    assert (np.diff(data["resultant"]) < 0).all()
    assert data["value"][-1] < 0.8 * data["value"][0]


def test_every_method_is_in_the_drawing_of_what_travels():
    drawn = re.findall(r"\w+", (ROOT / "docs/figures/travels.svg").read_text(encoding="utf-8"))
    described = re.findall(r"\w+", re.search(r"!\[(.*)\]\(figures/travels", markdown_of("docs/methods.md"))[1])
    assert set(methods.RECIPES) <= set(drawn) & set(described)


def test_the_stages_are_the_schedules_own():
    described = re.search(r"!\[(.*)\]\(../figures/stages", markdown_of("docs/methods/lw_fedssl.md"))[1]
    for title, kind in (("LW-FedSSL", LayerWise), ("Prog-FedSSL", Progressive)):
        for number in range(1, LAYERS + 1):
            plan = kind(name="", rounds_per_stage=1).plan(LAYERS, number, seed=0)
            roles = [*((n, "frozen") for n in plan.frozen), *((n, "trains") for n in plan.active)]
            layers = ", ".join(f"layer {n + 1} {does}" for n, does in sorted(roles))
            assert f"{title}, stage {number}: {layers}" in described


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
    for cell in CELLS[name]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), names)
    printed = capsys.readouterr().out
    if name == "one_loss":
        formula, operator = (line.split()[-1] for line in printed.splitlines()[:2])
        assert float(formula) == pytest.approx(float(operator), rel=1e-5)
    else:
        together, alone = names["means"][1], names["means"][2]
        assert together > alone  # as the notebook's text says


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_what_its_cells_print_and_describes_its_pictures(path):
    """What CONTRIBUTING.md says stores it; warnings are taken out by hand."""
    cells = [cell for cell in CELLS[path.stem] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] is not None for cell in cells)
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell["outputs"])
    page = markdown_of(f"notebooks/{path.name}")
    assert page.count("<img alt=") == sum("alt" in cell["metadata"] for cell in cells)
    pictures = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert page.count("```text") == sum(len(cell["outputs"]) for cell in cells) - len(pictures)


def test_a_cells_value_is_shown_as_what_it_prints_is(tmp_path):
    outputs = [{"name": "stdout", "text": ["1\n"]}, {"data": {"text/plain": ["2"]}, "execution_count": 1}]
    cell = {"cell_type": "code", "source": ["print(1)\n", "2"], "metadata": {}, "outputs": outputs}
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": [cell]}))
    shown = markdown_of(str(tmp_path / "one.ipynb"))
    assert shown == "```python\nprint(1)\n2\n```\n\n```text\n1\n```\n\n```text\n2\n```"
