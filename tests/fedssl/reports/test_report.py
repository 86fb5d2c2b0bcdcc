"""The page about runs and its charts, on run folders with made-up figures, and with whatever others chose as names."""

import base64
import math
import re
from pathlib import Path

import pytest
import torch
from matplotlib.text import Text

from fedssl.errors import UserError
from fedssl.recipe.recipe import Recipe
from fedssl.reports import report
from fedssl.reports.plots import draw_table_picture
from fedssl.reports.report import write_report
from fedssl.run_folder.record import read_run, read_spectra
from fedssl.untrusted import quoted
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.reports.parsed_page import HOSTILE, Page
from tests.fedssl.reports.synthetic_runs import evaluated, write_run


def rows_of(knn_before: list[float], knn_after: list[float], rounds: int = 2) -> list:
    rows = evaluated(0, "knn", knn_before) + evaluated(0, "linear", [20.0] * len(knn_before))
    for number in range(1, rounds + 1):
        for k in range(len(knn_before)):
            rows += [(number, str(k), "bytes_down", 1000.0), (number, str(k), "bytes_up", 250.0)]
        rows += evaluated(number, "loss", [1.0 / number] * len(knn_before))
    return rows + evaluated(rounds, "knn", knn_after) + evaluated(rounds, "linear", [30.0] * len(knn_before))


def written(folder: Path, **recipes: Recipe) -> list[Path]:
    """A finished run of each recipe with the same figures, in a folder of its name."""
    return [write_run(folder / name, recipe, rows_of([1.0], [2.0])).path for name, recipe in recipes.items()]


def test_the_table_has_clients_means_and_spread_over_seeds(tiny, tmp_path):
    paths = [tmp_path / f"a{seed}" for seed in range(3)]
    for seed, (path, first) in enumerate(zip(paths, (50.0, 52.0, 57.0), strict=True)):
        write_run(path, tiny(name="ours", seed=seed), rows_of([40.0, 41.0, 42.0], [first, first + 10, first + 20]))
    page = Page(write_report(paths, tmp_path / "page.html"))
    # means 60, 62, 67: mean 63, sample standard deviation sqrt(13)
    assert page.table("method", "finished runs", "kNN accuracy (%)") == [
        ["ours", "3", "41.0 ± 0.0 → 63.0 ± 3.6", "20.0 ± 0.0 → 30.0 ± 0.0"]
    ]
    clients = page.table("method", "model of")
    assert clients[0][:4] == ["ours", "client 0", "small_convnet", "40.0 ± 0.0 → 53.0 ± 3.6"]
    assert clients[3][:4] == ["ours", "mean", "", "41.0 ± 0.0 → 63.0 ± 3.6"]


def test_a_global_model_has_one_row_and_architectures_repeat_over_the_clients(tiny, tmp_path):
    """One run has no spread; what its clients sent and received is summed."""
    rows = [(0, "global", "knn", 40.0), (1, "0", "loss", 3.0), (1, "mean", "loss", 3.0), (2, "global", "knn", 55.55)]
    rows += [(0, "global", "linear_0.05", 10.0), (2, "global", "linear_0.05", 20.0)]  # of no fraction that has a title
    write_run(tmp_path / "g", tiny(name="fedbyol"), rows)
    page = Page(write_report([tmp_path / "g"]))
    assert page.table("method", "model of") == [
        ["fedbyol", "global model", "small_convnet", "40.0 → 55.5", "10.0 → 20.0"]
    ]
    assert (tmp_path / "g" / "report.html").is_file()
    write_run(tmp_path / "a", tiny(**ALIGNED), rows_of([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]))
    page = Page(write_report([tmp_path / "a"]))
    architectures = [row[2] for row in page.table("method", "model of")]
    assert architectures == ["small_convnet", "small_convnet_wide", "small_convnet", ""]
    resources = page.table("method", "seed", "rounds", "memory")
    assert resources == [["tiny", "0", "2", "0.0 B", "0.0", "6.0 kB", "1.5 kB", "7.5 kB"]]


def test_the_page_stands_alone(tiny, tmp_path):
    counts = [[3, 0], [1, 2]]
    write_run(tmp_path / "a", tiny(), rows_of([1.0, 2.0], [4.0, 5.0]), counts=counts, class_names=("dog", "client"))
    assert read_run(tmp_path / "a").class_names == ["dog", "client"]
    (tmp_path / "a" / "timings.csv").write_text("round,seconds\n1,100\n2,80\n")
    path = write_report([tmp_path / "a"])
    page = Page(path)
    ran = ["tiny", "0", "finished, 2 rounds", "3 min", "6 images of 2 clients", "all images"]
    assert page.table("method", "seeds") == [ran]
    assert page.links == []
    assert not {"script", "link", "iframe", "object"} & page.tags
    for source in page.sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(data, validate=True)
    assert not re.search(r"url\(|@import", path.read_text(encoding="utf-8"))
    # loss curve and partition; two points of kNN are no curve, and one run has no bars
    assert len(page.sources) == 2
    first = path.read_bytes()
    assert write_report([tmp_path / "a"]).read_bytes() == first


@pytest.mark.parametrize(
    ("partition", "counts", "drawn"),
    [("sites", [[60], [0]], True), ("sites", [[0], [0]], False), ("iid", [[0], [0]], True)],
)
def test_the_page_of_sites_tells_who_holds_what_and_who_was_left_out(partition, counts, drawn, tiny, tmp_path):
    recipe = tiny(partition={"name": partition, "clients": 2}, rounds=9)
    reasons = [(n, 1, "no answer within 5 s") for n in (1, 2, 4, 7, 8, 9)] + [(3, 1, HOSTILE), (3, 0, "a\x1b[2J")]
    rows = rows_of([1.0, 2.0], [4.0, 5.0], rounds=9)
    write_run(tmp_path / "a", recipe, rows, counts=counts, class_names=("images",), refused=reasons)
    page = Page(write_report([tmp_path / "a"]))
    assert page.table("method", "seed", "client", "rounds", "reason") == [
        ["tiny", "0", "0", "3", "a\\x1b[2J"],
        ["tiny", "0", "1", "6 of rounds 1 to 9", "no answer within 5 s"],
        ["tiny", "0", "1", "3", HOSTILE],
    ]
    assert page.table("method", "seeds")[0][4] == ("60 images of 2 clients" if sum(counts[0]) else "-")
    charts = [caption for caption in page.captions if caption.startswith("tiny (seed 0)")]
    assert len(charts) == drawn
    assert all(("as the sites stated" in caption) == (partition == "sites") for caption in charts)


def test_curves_are_drawn_of_what_was_logged_in_several_rounds(tiny, tmp_path):
    rows = rows_of([1.0], [4.0]) + evaluated(1, "knn", [2.0])
    rows += [(n, "mean", name, value) for n in (1, 2) for name, value in (("cka", 0.5), ("transported_mass", 0.1))]
    rows += [(n, "mean", "total_loss", 1.0 / n) for n in (1, 2)]
    write_run(tmp_path / "a", tiny(), rows)
    path = write_report([tmp_path / "a"])
    shown = re.findall(r'alt="(.*?) by round"', path.read_text(encoding="utf-8"))
    # total_loss repeats the loss here
    assert shown == ["objective&#39;s loss", "CKA with the target kernel", "kNN accuracy (%)", "transported mass"]


def test_the_spectrum_of_each_methods_first_finished_run_is_drawn(tiny, tmp_path):
    runs = [tmp_path / name for name in ("begun", "first", "second")]
    for path, method, rounds in zip(runs, "aab", (1, 2, 2), strict=True):
        directory = write_run(path, tiny(name=method), rows_of([1.0], [2.0], rounds=rounds))
        directory.write_spectra({"0": torch.tensor([2.0, 1.0]), "1": torch.tensor([1.0])})
    assert "Collapse of the representations" in Page(write_report(runs, tmp_path / "page.html")).text
    assert read_spectra(runs[1]) == [[2.0, 1.0], [1.0]]
    assert "Collapse" not in Page(write_report(runs[0])).text
    (runs[1] / "spectrum.csv").write_text("client,index,value\n0,0,inf\n")
    with pytest.raises(UserError, match=r"spectrum\.csv cannot be read"):
        write_report(runs, tmp_path / "page.html")


def test_accuracy_is_drawn_over_what_clients_have_computed_and_sent(tiny, tmp_path, monkeypatch):
    for name, flops in (("a", 100.0), ("b", 40.0)):
        rows = [row for n, value in ((0, 1.0), (1, 2.0), (2, 3.0)) for row in evaluated(n, "knn", [value, value])]
        rows += [(n, str(k), "flops", flops * (1 + k)) for n in (1, 2) for k in (0, 1)]
        rows += [(n, str(k), "bytes_up", 8.0) for n in (1, 2) for k in (0, 1)]
        rows += [(n, "mean", "memory", value) for n, value in ((1, 2e6), (2, 1e6))]
        rows += [(n, "mean", "rank_kept", 1.0) for n in (1, 2)]  # a constant, which needs no curve
        write_run(tmp_path / name, tiny(name=name), rows)
    write_run(tmp_path / "begun", tiny(name="a", seed=1), evaluated(0, "knn", [1.0, 1.0]))  # and no further
    drawn = []
    draw = report.draw_curves
    monkeypatch.setattr(report, "draw_curves", lambda *args: drawn.append(args[3:]) or draw(*args))
    page = Page(write_report([tmp_path / name for name in ("begun", "a", "b")], tmp_path / "page.html"))
    by_round = [text.split(" (")[0] for text in page.descriptions if text.endswith("by round")]
    assert by_round == ["kNN accuracy", "memory of a training step"]
    spent = [given[0] for given in drawn if given]
    assert [by_method for _, by_method in spent] == [
        {"a": {0: 0.0, 1: 150.0, 2: 300.0}, "b": {0: 0.0, 1: 60.0, 2: 120.0}},
        {name: {0: 0.0, 1: 8.0, 2: 16.0} for name in "ab"},
    ]
    _begun, *whole = (row[3:5] for row in page.table("method", "seed", "rounds", "memory"))
    assert whole == [["2.0 MB", "600.0"], ["2.0 MB", "240.0"]]
    # one method has nobody to be compared with
    assert "so far" not in Page(write_report([tmp_path / "a"])).text


def test_everything_is_escaped(tiny, tmp_path):
    recipe = tiny(name=HOSTILE, description=HOSTILE)
    path = tmp_path / "<script>{{ 7919 * 7907 }}"
    write_run(path, recipe, rows_of([1.0], [4.0], rounds=1), counts=[[1, 2]], class_names=("<b>", "&"))
    page = Page(write_report([path], tmp_path / "page.html"))
    assert "script" not in page.tags
    assert "b" not in page.tags
    # title, heading, description, four tables, a warning, two captions, and the recipe's name and description
    assert page.text.count(HOSTILE) >= 9
    assert f"fedssl run --resume {quoted(path)}" in page.text
    assert "62615533" not in page.text
    assert page.table("method", "seeds")[0][0] == HOSTILE
    assert [row[2] for row in page.table("method", "seed", "folder")] == [str(path)]
    assert any(HOSTILE in caption for caption in page.captions)


def test_an_unfinished_run_is_reported_as_such(tiny, tmp_path):
    write_run(tmp_path / "done", tiny(name="ours", seed=0), rows_of([40.0], [50.0]))
    write_run(tmp_path / "half", tiny(name="ours", seed=1), rows_of([44.0], [99.0], rounds=1))
    write_run(tmp_path / "new", tiny(name="ours", seed=2, engine="flower"), [])
    page = Page(write_report([tmp_path / n for n in ("done", "half", "new")], tmp_path / "page.html"))
    assert page.table("method", "seeds") == [["ours", "0, 1, 2", "1 of 3 finished, 2 rounds", "0 s", "-", "all images"]]
    assert "seed 1 is unfinished, 1 of 2 rounds done" in page.text
    assert f"fedssl run --resume {tmp_path / 'half'}" in page.text
    assert "seed 2 is unfinished, no round done: flwr run of its app continues it" in page.text
    # what an unfinished run reached is no result
    assert page.table("method", "finished runs")[0][2] == "42.0 ± 2.8 → 50.0"


def test_runs_that_differ_in_more_than_their_seed_are_told_and_what_differs_stands_side_by_side(tiny, tmp_path):
    runs = written(tmp_path, a=tiny(), b=tiny(training={"batch_size": 16}), c=tiny(name="other"))
    page = Page(write_report(runs, tmp_path / "page.html"))
    assert "tiny: these runs have one name but differ in training.batch_size" in page.text
    assert "tiny: several runs have the same seed" in page.text
    assert "other:" not in page.text
    fair = Page(write_report(runs[1:], tmp_path / "page.html"))
    assert "differ in" not in fair.text
    assert "different numbers of images" not in fair.text
    runs += written(tmp_path, d=tiny(name="own images", evaluation={"images": 40}))
    unlike = Page(write_report(runs[1:], tmp_path / "page.html"))
    assert "the models may have been measured on different numbers of images" in unlike.text
    assert "same seed" not in fair.text
    # beside each other stands what differs
    assert fair.table("setting") == [["training.local_epochs", "5", "1"], ["training.batch_size", "16", "8"]]


def test_several_runs_are_reported_where_one_stands_and_one_folder_given_twice_counts_once(tiny, tmp_path, monkeypatch):
    written(tmp_path, a=tiny(), b=tiny(seed=1))
    monkeypatch.chdir(tmp_path)
    path = write_report([Path("a"), tmp_path / "a" / ".." / "a", Path("b")])
    assert path.resolve() == tmp_path / "report.html"
    assert Page(path).table("method", "seeds")[0][1] == "0, 1"


def test_bad_input_is_told_in_one_line(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "new", tiny(), [])
    written(tmp_path, good=tiny())
    for runs, output, message in [
        ([], None, "name at least one run"),
        ([tmp_path / "empty"], None, "holds no recipe.yaml"),
        ([tmp_path / "absent"], None, "holds no recipe.yaml"),
        ([tmp_path / "new"], None, "has no finished round to report on yet"),
        ([tmp_path / "good"], tmp_path / "good" / "recipe.yaml" / "page.html", "cannot be written"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            write_report(runs, output)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*/report.html"))


# Names and values that somebody else chose

#: as names of recipes, classes and labels; a formula that cannot be drawn, mark-up, and what only looks odd
ODD = [r"$\frac{$", "$x$", "<script>alert(1)</script>", "--><svg>", "_hidden", "a/../b", "x" * 200, "日本"]
#: only as names of metrics, which a site chooses
METRIC_NAMES = [*ODD, "a\rb", "a\nb", "\x1b[31m", "\u202ea", "a\0b", '","', ""]


def test_a_report_is_drawn_whatever_names_sites_and_recipes_chose(tiny, tmp_path):
    """A run of each odd name; the sites of each have logged metrics of all hostile names."""
    rows = evaluated(0, "knn", [40.0]) + evaluated(2, "knn", [50.0])
    rows += [row for name in METRIC_NAMES for number in (1, 2) for row in evaluated(number, name, [1.0])]
    paths = [tmp_path / str(k) for k in range(len(ODD))]
    for path, name in zip(paths, ODD, strict=True):
        counts = [[1, *range(1, len(ODD))]] if path == paths[0] else None
        write_run(path, tiny(name=name, description=name), rows, counts=counts, class_names=tuple(ODD))
    page = write_report(paths, tmp_path / "page.html", images=False)
    text = page.read_text()
    assert all(character == "\n" or character.isprintable() or character in "\u00a0" for character in text)
    assert "<script>" not in text
    # curves of the metrics, kNN before and after, and who holds what
    assert len(Page(page).sources) >= len(METRIC_NAMES) + 2
    assert len((paths[0] / "metrics.csv").read_text().split("\n")) == len(rows) + 2


def test_a_site_that_invents_many_metrics_does_not_fill_the_page(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MOST_CURVES", 3)
    rows = [(number, "mean", f"m{i}", 1.0) for number in (1, 2) for i in range(100)]
    write_run(tmp_path / "a", tiny(), [*evaluated(0, "knn", [40.0]), *rows, *evaluated(2, "knn", [50.0])])
    page = write_report([tmp_path / "a"])
    assert len(Page(page).sources) == 3
    assert "Only 3 metrics are drawn; metrics.csv holds all of them." in page.read_text()


@pytest.mark.parametrize("number", [math.inf, math.nan, -1e308])
def test_a_report_is_written_whatever_the_values_are(number, tiny, tmp_path):
    rows = [*evaluated(0, "knn", [40.0]), (1, "0", "bytes_up", number), (1, "mean", "loss", number)]
    rows += [(2, who, metric, number) for who in ("0", "mean") for metric in ("knn", "loss", "effective_rank")]
    for seed in (0, 1):
        write_run(tmp_path / str(seed), tiny(seed=seed), rows)
    assert write_report([tmp_path / "0", tmp_path / "1"], tmp_path / "page.html").is_file()


def test_a_tables_picture_is_drawn_whatever_its_labels_are():
    """Also of rows that are not finished."""
    bars = {"knn": [*((label, "method", [1.0], [2.0, 3.0]) for label in ODD), ("alone", "baseline", [], [])]}
    draw_table_picture(ODD[0], ODD[2], bars, {}, ODD[4]).draw_without_rendering()
    plain = draw_table_picture("title", "data", bars, {"knn": [40.0]}, "a line\nanother")
    plain.draw_without_rendering()
    assert {"title", "data", "a line\nanother"} <= {text.get_text() for text in plain.findobj(Text)}
