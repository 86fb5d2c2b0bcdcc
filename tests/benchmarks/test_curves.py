"""``python -m benchmarks.curves``: its sizes, what it writes, and what the operators' pages show of it."""

from __future__ import annotations

import csv
import importlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the sdist")

from benchmarks import curves, measure
from benchmarks.measure import Settings
from website import measured


def point(size: int, name: str, milliseconds: str, **more: Any) -> curves.Point:
    known = {"status": "ok", "same_result": True, "processor": "a processor", "beyond_outputs_mib": "1.5"}
    return {**dict.fromkeys(curves.COLUMNS, ""), **known, "size": size, "implementation": name, **more} | {
        "milliseconds": milliseconds
    }


POINTS = [
    point(10, "ours", "1.5"),
    point(10, "peer", "3"),
    point(100, "ours", "20"),
    point(100, "peer", "", status="not installed", beyond_outputs_mib=""),
    point(100, "of large sizes", "40"),
]


@pytest.mark.parametrize("operator", curves.OPERATORS)
def test_sizes_ascend_and_ours_comes_first(operator: str) -> None:
    module = importlib.import_module(f"benchmarks.bench_{operator}")
    for quick in (True, False):
        sizes = module.curve_cases(quick)
        assert list(sizes) == sorted(sizes)
        assert len(sizes) > 1
        assert all(case.timed and case.implementations[0].name.startswith("fedkernels.") for case in sizes.values())
        loaded = measure.load_cases(operator, Settings(quick=quick, curve=True))
        assert [case.size for case in loaded] == [case.size for case in sizes.values()]
        assert all(case.truth is None and case.floor is None for case in loaded)


def test_the_files_hold_every_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(curves, "measure", lambda operator, settings: POINTS)
    assert curves.main(["client_weights", "--output", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["client_weights.csv", "client_weights.svg"]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "client_weights.csv").read_text())))
    assert [(line["size"], line["implementation"], line["milliseconds"]) for line in lines] == [
        (str(one["size"]), one["implementation"], one["milliseconds"]) for one in POINTS
    ]
    svg = (tmp_path / "client_weights.svg").read_text()
    assert all(f">{text}<" in svg for text in ("ours", "peer", "clients", "ms"))
    assert curves.drawing("client_weights", POINTS) == svg


def test_a_page_shows_the_picture_and_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    assert "No curve" in measured.curves("client_weights")
    folder = tmp_path / "benchmarks/results/curves/a-processor"
    folder.mkdir(parents=True)
    (folder / "client_weights.csv").write_text(curves.as_csv(POINTS))
    (folder / "client_weights.svg").write_text(curves.drawing("client_weights", POINTS))
    page = measured.curves("client_weights")
    assert "| 10 | 1.5 (1.5) | 3 (1.5) | - |" in page
    assert "| 100 | 20 (1.5) | not installed | 40 (1.5) |" in page
    assert "`python -m benchmarks.curves client_weights`" in page
    picture = re.search(r"<svg.*</svg>", page, re.DOTALL)
    assert picture
    assert "\n\n" not in picture[0]


@pytest.mark.parametrize("operator", curves.OPERATORS)
def test_a_page_shows_what_is_committed(operator: str) -> None:
    written = list(measured.ROOT.glob(f"benchmarks/results/curves/*/{operator}.csv"))
    assert measured.curves(operator).count("### Over sizes, on") == len(written)
