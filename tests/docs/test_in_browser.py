"""The site, a run's report and a table's page in a headless browser; needs the extras `docs` and `browser`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedssl.recipe.reading import parse_recipe
from fedssl.reports.report import write_report
from fedssl.tables.files import write_results
from fedssl.tables.results import read_results
from tests.fedssl.conftest import tiny_values
from tests.fedssl.reports.synthetic_runs import evaluated, make_table, write_run
from website import check_in_browser
from website.repository_files import ROOT


def write_pages(folder: Path) -> list[Path]:
    """A report of two methods and a table's page, with made-up figures."""
    table = make_table(paper={"ours": {"knn": "71.2"}}, metrics=["knn", "effective_rank"])
    for row in table.rows:
        for seed in table.seeds:
            after = 50.0 + 2 * seed + 8 * (row.label == "ours")
            rows = evaluated(0, "knn", [40.0, 42.0, 41.0])
            for number in (1, 2):
                rows += [(number, str(k), name, 1e5) for k in range(3) for name in ("bytes_down", "bytes_up")]
                rows += evaluated(number, "loss", [1.0 / number, 2.0 / number, 3.0])
            rows += evaluated(2, "knn", [after - 1, after + 1, after])
            recipe = parse_recipe(tiny_values(name=row.label, seed=seed))
            counts = [[30, 10, 0], [0, 20, 20], [5, 5, 30]]
            spectrum = {str(k): [3.0, 1.0, 0.2] for k in range(3)}
            path = folder / row.label / f"seed-{seed}"
            write_run(path, recipe, rows, counts=counts, spectrum=spectrum, class_names=("cat", "dog", "owl"))
    write_results(table, [read_results(table, folder)], folder)
    runs = [folder / label / f"seed-{seed}" for label in ("ours", "alone") for seed in table.seeds]
    report = write_report(runs, folder / "report.html", collapse=False, images=False)
    return [report, folder / "table.html"]


@pytest.mark.nightly  # minutes: twelve pages, two widths, two themes
def test_no_page_has_a_problem(tmp_path):
    if find_spec("mkdocs") is None:
        pytest.skip("needs pip install '.[docs,browser]'")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=ROOT, check=True)
    if reason := check_in_browser.missing():
        pytest.skip(reason)
    assert check_in_browser.main([str(page) for page in write_pages(tmp_path)]) == 0
