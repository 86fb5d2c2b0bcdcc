"""Every cell of the notebooks runs, and the pages show what was stored."""

from __future__ import annotations

import matplotlib
import pytest

from website import notebooks


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
