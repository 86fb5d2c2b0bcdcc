"""The figures of the pages are those of the committed results, and figures without a result are listed here."""

import difflib
import json
import re

import pytest

from benchmarks import write
from website import quoted_results, result_tables, result_verdicts
from website.quoted_results import figures, renewed
from website.repository_files import ROOT
from website.result_tables import RESULTS

LISTED = quoted_results.listed()
#: pages all of whose figures are listed, like those of pages that quote a result
METHODS = [f"docs/methods/{path.name}" for path in sorted((ROOT / "docs" / "methods").glob("*.md"))]


def relative(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", LISTED)
def test_the_figures_of_a_page_are_those_of_the_results(page):
    markdown = (ROOT / page).read_text(encoding="utf-8")
    now = renewed(page, markdown, LISTED[page])
    assert now == (markdown, LISTED[page]), "call python -m website.quoted_results, and read the text around"


@pytest.mark.parametrize("page", [relative(path) for path in sorted((ROOT / "docs").rglob("*.md"))])
def test_a_page_without_a_list_has_no_result(page):
    """No mean with its spread; a method's page has no figure at all."""
    found = [match[0] for match in figures((ROOT / page).read_text(encoding="utf-8"))]
    assert page in LISTED or not [figure for figure in found if page in METHODS or "±" in figure]


@pytest.mark.parametrize("summary", sorted(RESULTS.rglob("summary.csv")), ids=lambda path: relative(path.parent))
def test_summaries_are_those_of_the_seeds(summary):
    table = result_tables.read(summary.parent)
    for line in result_tables.read_csv(summary):
        if line["mean"]:
            figures = [float(line[name]) for name in ("mean", "spread") if line[name]]
            assert table[result_tables.column_of(line)][line["row"]] == pytest.approx(figures), line


def test_the_operators_tables_are_what_their_json_gives():
    page = write.SPEED_PAGE.read_text(encoding="utf-8")
    shown = page.partition(f"{write.START}\n")[2].partition(write.END)[0]
    wanted = write.short_tables(RESULTS / "cpu")
    assert shown == wanted, "\n".join(difflib.ndiff(shown.splitlines(), wanted.splitlines()))


@pytest.mark.parametrize(
    ("folder", "column", "left_out", "bound"),
    [
        ("lw_fedssl_resources", "flops", ("ResNet-18", "RA"), "1.5 %"),
        ("lw_fedssl_resources", "flops ratio", ("ResNet-18", "RA"), "0.003"),
        ("lw_fedssl_resources", "traffic", (), "1.9 %"),
        ("lw_fedssl_resources", "traffic ratio", (), "0.006"),
        ("lw_fedssl_resources_blood", "flops", ("Prog-FedSSL at 224 pixels",), "0.2 %"),
        ("lw_fedssl_resources_blood", "traffic", (), "1.7 %"),
    ],
)
def test_counted_resources_are_as_near_to_the_papers_as_their_page_says(folder, column, left_out, bound):
    table = result_tables.read(RESULTS / folder)
    pairs = [
        (table[column][row][0], paper[0])
        for row, paper in table[f"paper's {column}"].items()
        if not row.endswith(left_out)
    ]
    number, _, percent = bound.partition(" ")
    distances = [100 * abs(ours / paper - 1) if percent else abs(ours - paper) for ours, paper in pairs]
    assert max(distances) <= float(number)
    assert f"within {bound}" in (RESULTS / folder / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A table of two seeds, with the paper's figures, and one of resources."""
    folders = {
        "trained/table.csv": "row,role,seed,metric,value\nA,method,0,knn,40\nA,method,1,knn,42\n"
        "B,control,0,knn,30.25\nC,control,0,knn,38.04\n",
        "trained/summary.csv": "row,role,metric,mean,spread,seeds,paper\nA,method,knn,41,1.41,2,90.1 ± 0.3\n",
        "counted/table.csv": "row,resource,ours,ratio,paper,paper_ratio\nA,flops,12.34,0.5,13,0.52\n",
    }
    for name, text in folders.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(quoted_results, "RESULTS", tmp_path)


@pytest.mark.parametrize(
    ("text", "lines", "filled"),
    [
        ("1.5 and 2.50, 3.5", ["1.5; 2.50 = trained | knn | A; B", "3.5 = mu"], "41.0 and 30.25, 3.5"),
        ("9.9 or 1.5 ± 0.10", ["9.9 = x", "1.5 ± 0.10 = trained | knn | A"], "9.9 or 41.0 ± 1.41"),
        ("1.5", ["1.5 = trained | knn | A - best control"], "3.0"),
        ("-1.5", ["-1.5 = trained | knn | B - C"], "-7.8"),
        ("1.5 ± 0.1", ["1.5 ± 0.1 = trained | paper's knn | A"], "90.1 ± 0.3"),
        ("1.5, 0.0", ["1.5; 0.0 = counted | flops; paper's flops ratio | A"], "12.3, 0.5"),
        ("1,000 images/s", ["1,000 = trained | knn | C"], "38 images/s"),
        ("v1.2.3, `0.1`, 7.5 %", ["7.5 = trained | knn | B"], "v1.2.3, `0.1`, 30.2 %"),
    ],
)
def test_a_figure_is_filled_in_from_its_row(results, text, lines, filled):
    markdown, listed = renewed("page.md", text, lines)
    assert markdown == filled
    assert renewed("page.md", markdown, listed) == (markdown, listed)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("1.5", "1.5 = nothing | knn | A", "nothing has no table.csv"),
        ("1.5", "1.5 = trained | linear | A", "trained has no column 'linear'; it has knn"),
        ("1.5", "1.5 = trained | knn | D", "no row 'D' in the column knn; it has A; B; C"),
        ("1.5 ± 0.1", "1.5 ± 0.1 = trained | knn | B", "trained has no spread of B in the column knn"),
        ("1.5", "1.5 = trained | knn | A; B", "has other than 2 figures"),
        (
            "1.5, 2.5",
            "1.5 = trained | knn | A",
            "page.md has (+) and quoted_results.yaml lists (-) other figures: + 2.5",
        ),
        ("1.5", "1.6 = trained | knn | A", "other figures: - 1.6, + 1.5"),
    ],
)
def test_a_figure_without_its_line_or_row_is_refused(results, text, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        renewed("page.md", text, [line])


def test_a_page_that_is_refused_leaves_all_as_they_were(results, tmp_path, monkeypatch):
    monkeypatch.setattr(quoted_results, "ROOT", tmp_path)
    monkeypatch.setattr(quoted_results, "LIST", tmp_path / "list.yaml")
    before = {"a.md": "1.5", "b.md": "2.5", "list.yaml": "a.md: [1.5 = trained | knn | A]\nb.md: []\n"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"b.md has \(\+\)"):
        quoted_results.main()
    assert {name: (tmp_path / name).read_text() for name in before} == before


def test_a_simulation_that_failed_and_a_loop_that_is_not_installed_have_no_figure(tmp_path):
    rows = {"fedssl": {"images": 6, "times": [2.0]}, "kornia": {"images": 6, "times": [], "status": "not installed"}}
    failed = {"title": "large", "status": "out of memory"}
    results = {"simulations": [failed], "trainings": [failed, {"title": "byol", "rows": rows}]}
    (tmp_path / "simulation.json").write_text(json.dumps(results))
    assert result_tables.read(tmp_path) == {"fedssl, images/s": {"byol": [3.0]}, "times fedssl": {"byol": [1.0]}}


@pytest.mark.parametrize(
    "path", result_verdicts.judged_tables(), ids=lambda path: str(path.parent.relative_to(RESULTS))
)
def test_the_committed_verdicts_are_those_of_the_rule(path):
    """`python -m website.result_verdicts` writes them."""
    assert result_verdicts.judged(path) == path.read_text(encoding="utf-8")
