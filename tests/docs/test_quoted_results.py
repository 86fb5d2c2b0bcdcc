"""The figures of the pages are those of the committed results, and figures without a result are listed here."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import write
from website import quoted_results, result_tables, result_verdicts
from website.quoted_results import FIGURE, fill, unmarked
from website.repository_files import ROOT
from website.result_tables import RESULTS

#: Every number with decimals that no result holds, of the pages whose figures come from results, and what it is.
BY_HAND = {
    "what_reproduces_what.md": {
        "0.1 0.1 0.5": "alpha of the Dirichlet distributions of FedU2's Table 2",
        "0.40 0.67": "ratios that LW-FedSSL's Table 4 prints; its rounded GFLOPs give others",
        "0.5 0.5": "beta of LW-FedSSL's Table 13",
    },
    "demo.md": {"0.5": "mu"},
    "hetero_ssfl.md": {"0.5": "mu"},
    "fedmae.md": {"0.90 0.74 29.4 31.9 27.2 27.6 35.4 30.1 30.4 26.4": "ten rounds, measured by hand"},
    "lw_fedssl.md": {
        "0.05": "a temperature",
        "1.73 3.97 16.5 42.6 1.23 2.53 16.7 42.6 0.79 1.56 10.8 13.8 0.79 1.82 16.5 42.6": "of the runs' metrics.csv",
        "97.2 95.0": "raw pixels",
    },
    "speed.md": {
        "0.5 0.1 0.05": "temperatures",
        "0.27 0.46 0.99998 0.06": "errors of losses in half precision, measured by hand",
        "1.17 1.43 1.57 1.40 1.74 2.18 1.68 1.33": "a step in bfloat16, measured by hand",
        "1.17 1.35 1.31 1.12 1.08 1.10": "a step with channels last, measured by hand",
        "22.0 21.8 26.2 23.8": "a step with two threads of views, measured by hand",
        "1.2": "a step without freed memory, measured by hand",
        "1.26 1.07": "a step with torch.compile, measured by hand",
    },
}
#: no figures are looked for in code, equations and the operators' table, which has a test of its own
CODE = re.compile(
    r"<!-- benchmarks -->.*?<!-- /benchmarks -->|^```.*?^```$|`[^`\n]*`|^    .*?$|\$\$.*?\$\$|\$[^$\n]*\$",
    re.DOTALL | re.MULTILINE,
)
LISTED_PAGES = [
    *(ROOT / "docs" / name for name in ("what_reproduces_what.md", "demo.md", "speed.md")),
    *sorted((ROOT / "docs" / "methods").glob("*.md")),
]
QUOTING_PAGES = [page for page in quoted_results.pages() if "<!-- = " in page.read_text(encoding="utf-8")]


def relative(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", QUOTING_PAGES, ids=relative)
def test_quoted_figures_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    filled = fill(text)
    changes = [
        f"line {number}: {before} -> {after}"
        for number, (line, new) in enumerate(zip(text.splitlines(), filled.splitlines(), strict=True), start=1)
        for before, after in zip(FIGURE.findall(line), FIGURE.findall(new), strict=True)
        if before != after
    ]
    assert not changes, f"{relative(page)}: call python -m website.quoted_results, and read the text around: {changes}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=relative)
def test_figures_without_a_result_are_listed(page):
    """Every figure of LISTED_PAGES, and a mean with its spread of any page."""
    listed = " ".join(BY_HAND.get(page.name, {})).split()
    found = unmarked(CODE.sub("", page.read_text(encoding="utf-8")))
    found = [figure for figure in found if page in LISTED_PAGES or "±" in figure]
    assert Counter(found) == Counter(listed), "name the result behind a figure (website/quoted_results.py), or list it"


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
    ("text", "filled"),
    [
        ("1.5 and 2.50<!-- = trained: knn: A; B --> 3.5", "41.0 and 30.25<!-- = trained: knn: A; B --> 3.5"),
        ("9.9 and 1.5 ± 0.10<!-- = trained: knn: A -->", "9.9 and 41.0 ± 1.41<!-- = trained: knn: A -->"),
        ("1.5<!-- = trained: knn: A - best control -->", "3.0<!-- = trained: knn: A - best control -->"),
        ("-1.5<!-- = trained: knn: B - C -->", "-7.8<!-- = trained: knn: B - C -->"),
        ("1.5 ± 0.1<!-- = trained:\npaper's knn: A -->", "90.1 ± 0.3<!-- = trained:\npaper's knn: A -->"),
        (
            "1.5, 0.0, 0.00<!-- = counted: flops: A; flops ratio: A; paper's flops ratio: A -->",
            "12.3, 0.5, 0.52<!-- = counted: flops: A; flops ratio: A; paper's flops ratio: A -->",
        ),
        ("5.0 images/s<!-- = trained: knn: A -->", "41.0 images/s<!-- = trained: knn: A -->"),
        ("1,000 images/s<!-- = trained: knn: C -->", "38 images/s<!-- = trained: knn: C -->"),
        ("v1.2.3 in 2024, 7.5 %<!-- = trained: knn: B -->", "v1.2.3 in 2024, 30.2 %<!-- = trained: knn: B -->"),
    ],
)
def test_a_figure_is_filled_in_from_its_row(results, text, filled):
    assert fill(text) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5<!-- = trained -->", "trained has no column ''; it has knn"),
        ("1.5<!-- = nothing: knn: A -->", "nothing has no table.csv"),
        ("1.5<!-- = trained: linear: A -->", "trained has no column 'linear'; it has knn"),
        ("1.5<!-- = trained: knn: D -->", "no row 'D' in the column knn; it has A; B; C"),
        ("1.5 ± 0.1<!-- = trained: knn: B -->", "trained has no spread of B in the column knn"),
        ("| 1.5 |\n| 2.5<!-- = trained: knn: A; B -->", "names 2 figures, but only 1 with decimals"),
        ("1.5\n\n15 %<!-- = trained: knn: A -->", "names 1 figures, but only 0 with decimals"),
    ],
)
def test_a_mark_without_a_figure_is_refused(results, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fill(text)


def test_the_site_shows_the_results_figures_without_their_marks(results):
    pytest.importorskip("mkdocs")
    from website import hooks

    page = SimpleNamespace(file=SimpleNamespace(src_uri="start.md"), meta={})
    assert hooks.on_page_markdown("9.9<!-- = trained: knn: A --> %", page=page) == "41.0 %"


def test_figures_that_no_mark_names_are_found():
    assert unmarked("1.5 and 2.5 and 3.5<!-- = trained: knn: A; B --> 4.5 ± 0.1.") == ["1.5", "4.5 ± 0.1"]


@pytest.mark.parametrize(
    "path", result_verdicts.judged_tables(), ids=lambda path: str(path.parent.relative_to(RESULTS))
)
def test_the_committed_verdicts_are_those_of_the_rule(path):
    """`python -m website.result_verdicts` writes them."""
    assert result_verdicts.judged(path) == path.read_text(encoding="utf-8")
