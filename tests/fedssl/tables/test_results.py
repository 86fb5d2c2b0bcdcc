"""What a table's results say: the verdict's rule, and the table as text."""

import csv

import numpy as np
import pytest
from matplotlib.text import Text
from scipy import stats

from fedssl.tables.files import format_table, markdown_table, write_results
from fedssl.tables.results import Results, _lead, read_results, verdict
from fedssl.tables.runner import table_cells
from fedssl.tables.table import Table, cell_path
from tests.fedssl.reports.synthetic_runs import ROWS, evaluated, make_table, write_run


def results(knn: dict[str, list[float]], linear: dict[str, list[float]] | None = None, start: float = 10.0) -> Results:
    """Values by label and seed; linear is far above everywhere for the method where not given."""
    linear = linear or {label: [90.0 + 5 * (label == "ours") + s for s in (0, 1)] for label in knn}
    by_metric = {"knn": knn, "linear": linear}
    after = {(label, m): dict(enumerate(values[label])) for m, values in by_metric.items() for label in knn}
    before = {key: {0: start, 1: start + 1} for key in after}
    return Results(before=before, after=after)


def knn_verdict(table: Table, knn: dict[str, list[float]]) -> str:
    """The verdict on kNN accuracy, without the metric's name; rows that are not named have 50 and 52, `other` 99."""
    others = {label: [50.0, 52.0] for label in ("alone", "control 1", "control 2")} | {"other": [99.0, 99.0]}
    name, _, text = verdict(table, results(others | knn)).splitlines()[0].partition(": ")
    assert name == f"kNN accuracy ({len(table.seeds)} seed{'s' * (len(table.seeds) > 1)})"
    return text


BOTH = "beats alone by 3.0 ± 0.0 and control 1 by 3.0 ± 0.0"


@pytest.mark.parametrize(
    ("knn", "expected"),
    [
        (
            {"ours": [53.0, 55.0], "control 2": [50.9, 53.1]},
            "a collaboration gain. ours with 54.0 ± 1.4 beats alone by 3.0 ± 0.0, control 1 by 3.0 ± 0.0 and control 2 "
            "by 2.0 ± 0.1.",
        ),
        # of two seeds the mean difference must be above 9.0 times the spread, which is 0.3
        (
            {"ours": [53.0, 55.0], "control 2": [50.8, 53.2]},
            f"no collaboration gain. ours with 54.0 ± 1.4 {BOTH}. It is tied with control 2 (2.0 ± 0.3 above).",
        ),
        (
            {"ours": [40.0, 40.0], "alone": [51.0, 51.1], "control 1": [40.0, 41.0], "control 2": [40.0, 40.0]},
            "no collaboration gain. ours with 40.0 ± 0.0 is tied with control 1 (0.5 ± 0.7 below) and control 2 (less "
            "than 0.1 ± 0.0 away). It is behind alone (11.1 ± 0.1 below).",
        ),
    ],
)
def test_a_gain_is_said_where_every_baseline_and_control_is_beaten_seed_by_seed(knn, expected):
    assert knn_verdict(make_table(), knn) == expected


def test_seeds_that_move_all_rows_alike_hide_no_gain_and_a_planted_tie_is_a_tie():
    """Both have the same means and spreads; only the pairs differ."""
    table = make_table(seeds=[0, 1, 2], verdict="comparison", controls=[], baselines=["alone"], metrics=["knn"])
    for shuffled, expected in ((False, "beats alone by 1.0 ± 0.1"), (True, "is tied with alone (1.0 ± 17.2 above)")):
        alone = [40.0, 50.0, 60.0]
        ours = [50.9, 61.0, 41.1] if shuffled else [41.1, 50.9, 61.0]
        assert expected in knn_verdict(table, {"ours": ours, "alone": alone})
    random = np.random.default_rng(0)
    said = [knn_verdict(table, {row: list(random.normal(50, 1, 3)) for row in ("ours", "alone")}) for _ in range(200)]
    assert sum("is tied with" in text for text in said) >= 180


def test_the_limit_is_that_of_students_interval():
    differences = [1.0, 2.0, 3.5, 2.5, 0.5]
    mean, spread, limit = _lead(dict(enumerate(differences)), dict.fromkeys(range(5), 0.0))
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert (mean - limit, mean + limit) == pytest.approx((interval.low, interval.high))
    assert spread == pytest.approx(np.std(differences, ddof=1))


def test_each_metric_is_judged_for_itself():
    knn = {label: [50.0, 52.0] for label in ("ours", "alone", "control 1", "control 2")}
    first, second = verdict(make_table(), results(knn)).splitlines()
    assert first.startswith("kNN accuracy (2 seeds): no collaboration gain")
    assert second.startswith("Linear accuracy (2 seeds): a collaboration gain")
    assert verdict(make_table(metrics=["linear", "effective_rank"]), results(knn)) == second


def test_a_method_not_above_the_untrained_encoder_is_told():
    table = make_table(metrics=["knn"])
    knn = {"ours": [53.0, 55.0], "alone": [1.0, 1.0], "control 1": [1.0, 1.0], "control 2": [1.0, 1.0]}
    text = verdict(table, results(knn, start=60.0))
    assert text.endswith("It is not above the untrained encoder (60.5 ± 0.7).")
    assert "untrained" not in verdict(table, results(knn, start=40.0))
    alone = make_table(verdict="comparison", baselines=[], controls=[])
    assert (
        knn_verdict(alone, {"ours": [1.0, 2.0]})
        == "ours with 1.5 ± 0.7. It is not above the untrained encoder (10.5 ± 0.7)."
    )


@pytest.mark.parametrize(
    ("changes", "knn", "reason"),
    [
        ({"seeds": [0]}, {"ours": [90.0]}, "one seed has no spread, at least two are needed."),
        ({"controls": []}, {}, "the table has no controls."),
        ({"baselines": []}, {}, "the table has no baselines."),
        ({}, {"ours": [90.0], "alone": []}, "runs of ours and alone are missing."),
        ({"seeds": [0], "verdict": "comparison"}, {"ours": [53.0]}, "one seed has no spread, at least two are needed."),
    ],
)
def test_without_spread_controls_or_all_runs_nothing_is_said(changes, knn, reason):
    about = "the order" if "verdict" in changes else "a collaboration gain"
    found = knn_verdict(make_table(**changes), {"ours": [90.0, 90.0]} | knn)
    assert found == f"nothing can be said about {about}: {reason}"


def test_without_a_method_or_labels_nothing_is_judged():
    without_labels = results({})
    assert verdict(make_table(method=None), without_labels) == ""
    without_labels.finished.update({label: [0, 1] for label in ("ours", "alone", "control 1", "control 2")})
    assert verdict(make_table(metrics=["knn"]), without_labels).endswith(
        "ours, alone, control 1 and control 2 ran on images without labels, which have no accuracy."
    )


def test_the_table_has_the_untrained_row_first_and_the_papers_figures_beside(tmp_path, tiny):
    table = make_table(paper={"ours": {"knn": "71.2"}}, metrics=["knn", "effective_rank"])
    for row in table.rows[:2]:
        for seed in table.seeds:
            after = 50.0 + 2 * seed + (row.label == "ours")
            rows = evaluated(0, "knn", [40.0, 42.0]) + evaluated(2, "knn", [after - 1, after + 1])
            write_run(tmp_path / row.label / f"seed-{seed}", tiny(name=row.label, seed=seed), rows)
    found = read_results(table, tmp_path)
    lines = [" ".join(line.split()) for line in format_table(table, found).splitlines()]
    assert lines[0] == "kNN % in the paper effective rank"
    assert lines[2:6] == ["untrained 41.0 ± 0.0 -", "ours 52.0 ± 1.4 71.2 -", "alone 51.0 ± 1.4 -", "control 1 - -"]
    long = make_table(rows=[*ROWS, {"label": "a label of " + "many " * 9 + "words", "recipe": "local_only"}])
    text = format_table(long, read_results(long, tmp_path))
    assert max(map(len, text.splitlines())) <= 80
    assert "words" in text


@pytest.fixture(scope="module")
def two_scenarios(tiny, tmp_path_factory):
    """A table of two scenarios, whose second is not finished, and what it wrote."""
    folder = tmp_path_factory.mktemp("two_scenarios")
    scenarios = [
        {"label": "cross-silo (K = 3)", "paper": {"ours": {"knn": "71.20"}}},
        {"label": "cross-device", "paper": {"alone": {"knn": "60.1"}, "ours": {"knn": "62.3"}}},
    ]
    table = make_table(rows=ROWS[:2], controls=[], verdict="comparison", metrics=["knn"], scenarios=scenarios)
    for cell in table_cells(table, folder):
        after = 50.0 + 2 * cell.seed + 10 * cell.label.startswith("ours")
        last = evaluated(2, "knn", [after]) if cell.label != "alone, cross-device" else []
        write_run(cell.path, tiny(name=cell.recipe.name, seed=cell.seed), evaluated(0, "knn", [40.0]) + last)
    write_results(table, [read_results(table, folder, one) for one in table.all_scenarios], folder)
    return folder


def test_scenarios_stand_side_by_side_with_the_papers_figures(two_scenarios):
    lines = (two_scenarios / "table.md").read_text(encoding="utf-8").splitlines()
    header = "cross-silo (K = 3): kNN accuracy (%) | cross-silo (K = 3): in the paper"
    assert lines[4].startswith(f"| row | role | {header} | cross-device: kNN accuracy (%)")
    assert lines[6:9] == [
        "| untrained |  | 40.0 ± 0.0 |  | 40.0 ± 0.0 |  |",
        "| ours | method | 61.0 ± 1.4 | 71.20 | 61.0 ± 1.4 | 62.3 |",
        "| alone | baseline | 51.0 ± 1.4 |  | - | 60.1 |",
    ]
    text = "\n".join(lines)
    assert "Not all runs of alone (cross-device) are finished." in text
    assert "- cross-silo (K = 3): kNN accuracy (2 seeds): ours with 61.0 ± 1.4 beats alone by 10.0 ± 0.0." in text
    assert (
        "- cross-device: kNN accuracy (2 seeds): nothing can be said about the order: runs of alone are missing."
        in text
    )
    for slug in ("cross-silo-k-3", "cross-device"):
        assert (two_scenarios / f"picture-{slug}.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_has_mean_spread_seeds_and_the_papers_figure(two_scenarios):
    with open(two_scenarios / "summary.csv", newline="") as file:
        rows = {(r["scenario"], r["row"]): r for r in csv.DictReader(file)}
    ours = rows["cross-silo (K = 3)", "ours"]
    assert (ours["metric"], ours["mean"], ours["seeds"], ours["paper"]) == ("knn", "61.0", "2", "71.20")
    assert float(ours["spread"]) == pytest.approx(2**0.5)
    missing = rows["cross-device", "alone"]
    assert [missing[key] for key in ("mean", "spread", "seeds", "paper")] == ["", "", "0", "60.1"]
    with open(two_scenarios / "table.csv", newline="") as file:
        values = {(r["scenario"], r["row"], r["seed"]): r["value"] for r in csv.DictReader(file)}
    assert values["cross-silo (K = 3)", "alone", "1"] == "52.0"


def test_a_metric_of_an_architecture_is_the_mean_over_its_clients(tiny, tmp_path):
    recipe = tiny(architectures=["small_convnet", "small_convnet_wide"], rounds=2)
    rows = [*evaluated(0, "linear", [1.0, 2.0, 3.0]), *evaluated(2, "linear", [50.0, 70.0, 60.0])]
    metrics = ["linear", "linear@small_convnet", "linear@small_convnet_wide", "linear@resnet18"]
    table = make_table(seeds=[0], metrics=metrics, method=None, baselines=[], controls=[], rows=ROWS[:1])
    write_run(cell_path(tmp_path, "ours", 0), recipe, rows)
    read = read_results(table, tmp_path)
    assert [read.values("ours", metric) for metric in metrics] == [[60.0], [55.0], [70.0], []]
    assert "linear %, small_convnet" in format_table(table, read).replace("accuracy (%)", "%")
    write_results(table, [read], tmp_path)
    # a table that judges nothing has no roles
    assert "| row | linear accuracy (%) | " in (tmp_path / "table.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="unknown metric"):
        make_table(metrics=["memory@resnet18"])


def test_the_picture_tells_the_clients_of_the_method(tiny, tmp_path, monkeypatch):
    table = make_table(seeds=[0], rows=[ROWS[1], ROWS[0]], controls=[])
    write_run(cell_path(tmp_path, "alone", 0), tiny(partition={"clients": 1}, rounds=1), evaluated(1, "knn", [50.0]))
    write_run(cell_path(tmp_path, "ours", 0), tiny(rounds=1), evaluated(1, "knn", [50.0]))
    figures = []
    monkeypatch.setattr("fedssl.tables.files.png_bytes", lambda figure: figures.append(figure) or b"")
    write_results(table, [read_results(table, tmp_path)], tmp_path)
    assert "digits, 3 clients, 1 round, seed 0" in [text.get_text() for text in figures[0].findobj(Text)]


def test_the_worst_client_is_the_lowest_value_the_highest_loss_or_the_global_models(tiny, tmp_path):
    metrics = ["linear_0.01", "linear_0.01@worst", "loss@worst"]
    table = make_table(seeds=[0], metrics=metrics, method=None, baselines=[], controls=[], rows=ROWS[:2])
    of_clients = evaluated(2, "linear_0.01", [50.0, 70.0, 60.0]) + evaluated(2, "loss", [1.0, 3.0, 2.0])
    write_run(cell_path(tmp_path, ROWS[0]["label"], 0), tiny(rounds=2), of_clients)
    write_run(cell_path(tmp_path, ROWS[1]["label"], 0), tiny(rounds=2), [(2, "global", "linear_0.01", 55.0)])
    read = read_results(table, tmp_path)
    values = [[read.values(row["label"], metric) for metric in metrics] for row in ROWS[:2]]
    assert values == [[[60.0], [50.0], [3.0]], [[55.0], [55.0], []]]
    assert "linear accuracy, 1 % of the labels (%), worst client" in format_table(table, read)


def test_markdown_escapes_bars_and_folds_white_space():
    assert markdown_table(["row", "of\nwhat", "n"], [["a | b", "c", "1"]], text_columns=2) == (
        "| row | of what | n |\n|---|---|---:|\n| a \\| b | c | 1 |"
    )
