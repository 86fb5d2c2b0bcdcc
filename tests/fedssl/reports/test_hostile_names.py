"""Names and values that somebody else chose: a report and a table's picture are drawn whatever they are."""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path

import numpy as np
import pytest

from fedssl.errors import UserError
from fedssl.reports import report
from fedssl.reports.plots import Card, draw_table_picture
from fedssl.reports.report import write_report
from fedssl.run_folder.record import read_run
from tests.fedssl.reports.synthetic_runs import evaluated, write_run

#: as names of recipes, classes and labels; a formula that cannot be drawn, mark-up, and what only looks odd
ODD = [r"$\frac{$", "$x$", "<script>alert(1)</script>", "--><svg>", "_hidden", "a/../b", "x" * 200, "日本"]
#: only as names of metrics, which a site chooses
HOSTILE = [*ODD, "a\rb", "a\nb", "\x1b[31m", "\u202ea", "a\0b", '","', ""]


def charts(page: Path) -> list[str]:
    found = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page.read_text())
    return [base64.b64decode(one).decode() for one in found]


def test_a_report_is_drawn_whatever_names_sites_and_recipes_chose(tiny, tmp_path):
    """A run of each odd name; the sites of each have logged metrics of all hostile names."""
    rows = evaluated(0, "knn", [40.0]) + evaluated(2, "knn", [50.0])
    rows += [row for name in HOSTILE for number in (1, 2) for row in evaluated(number, name, [1.0])]
    paths = [tmp_path / str(k) for k in range(len(ODD))]
    for k, name in enumerate(ODD):
        counts = [[1, *range(1, len(ODD))]] if k == 0 else None
        recipe = tiny(name=name, description=name)
        write_run(paths[k], recipe, rows, counts=counts, class_names=tuple(ODD), spectrum={"0": [2.0, 1.0]})
    page = write_report(paths, tmp_path / "page.html", collapse=False, images=False)
    text = page.read_text()
    assert all(character == "\n" or character.isprintable() or character in "\u00a0" for character in text)
    assert "<script>" not in text
    # curves of the metrics, kNN before and after, the spectrum, and who holds what
    assert len(charts(page)) >= len(HOSTILE) + 3
    assert len((paths[0] / "metrics.csv").read_text().split("\n")) == len(rows) + 2


def test_a_site_that_invents_many_metrics_does_not_fill_the_page(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MOST_CURVES", 3)
    rows = [(number, "mean", f"m{i}", 1.0) for number in (1, 2) for i in range(100)]
    write_run(tmp_path / "a", tiny(), [*evaluated(0, "knn", [40.0]), *rows, *evaluated(2, "knn", [50.0])])
    page = write_report([tmp_path / "a"], collapse=False)
    assert len(charts(page)) == 3
    assert "Only 3 metrics are drawn; metrics.csv holds all of them." in page.read_text()


@pytest.mark.parametrize("number", [math.inf, math.nan, -1e308])
def test_a_report_is_written_whatever_the_values_are(number, tiny, tmp_path):
    rows = [*evaluated(0, "knn", [40.0]), (1, "0", "bytes_up", number), (1, "mean", "loss", number)]
    rows += [(2, who, metric, number) for who in ("0", "mean") for metric in ("knn", "loss", "effective_rank")]
    for seed in (0, 1):
        write_run(tmp_path / str(seed), tiny(seed=seed), rows)
    assert write_report([tmp_path / "0", tmp_path / "1"], tmp_path / "page.html", collapse=False).is_file()


def test_a_tables_picture_is_drawn_whatever_its_labels_are():
    """Of any number of clients, with and without an image, and of rows that are not finished."""
    bars = {"knn": [*((label, "method", [1.0], [2.0, 3.0]) for label in ODD), ("alone", "baseline", [], [])]}
    cards = [Card(label, label, np.zeros((3, 3), np.uint8) if k else None) for k, label in enumerate(ODD)]
    figure = draw_table_picture(ODD[0], ODD[2], cards, bars, {}, ODD[4])
    figure.draw_without_rendering()
    assert len([axes for axes in figure.axes if axes.get_title()]) == len(cards)
    plain = draw_table_picture("title", "data", [], bars, {"knn": [40.0]}, "a line\nanother")
    plain.draw_without_rendering()
    assert {"title", "data", "a line\nanother"} <= {text.get_text() for text in plain.texts}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: tiny", 'name: "a\\e[2J"', "control characters"),
        ("name: tiny", "name: [1]", "`name` must be"),
        ("rounds: 2", "rounds: many", "`rounds` must be a whole number from 1, got 'many'"),
        ("rounds: 2", "rounds: true", "`rounds` must be a whole number"),
        ("seed: 0", "seed: -1", "`seed` must be a whole number from 0"),
        ("rounds: 2", "rounds: 2\nrounds: 3", "stands there already"),
    ],
)
def test_a_received_recipe_of_another_form_is_told(old, new, message, tiny, tmp_path):
    write_run(tmp_path / "a", tiny(), evaluated(2, "knn", [50.0]))
    file = tmp_path / "a" / "recipe.yaml"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=message) as caught:
        read_run(tmp_path / "a")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("partition.csv", "9,-1,0"),
        ("partition.csv", f"9,1,{10**30}"),
        ("spectrum.csv", "0,1,nan"),
        ("spectrum.csv", "0,1"),
    ],
)
def test_received_figures_that_no_run_has_are_told(file, line, tiny, tmp_path):
    write_run(tmp_path / "a", tiny(), evaluated(2, "knn", [50.0]), counts=[[1, 2]], spectrum={"0": [1.0]})
    with open(tmp_path / "a" / file, "a") as text:
        text.write(f"{line}\n")
    with pytest.raises(UserError, match="cannot be read as a run's folder"):
        read_run(tmp_path / "a")
