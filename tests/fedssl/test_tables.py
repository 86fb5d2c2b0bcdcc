"""Tables: how they are read, run, continued and judged."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedssl import tables
from fedssl.errors import UserError
from fedssl.run_directory import RunDirectory
from fedssl.tables import Results, Table, cell_recipe, format_table, load_table, run_table, table_names, verdict

from .conftest import ALIGNED, tiny_values
from .synthetic_runs import evaluated, write_run

ROWS = [{"label": label, "recipe": "local_only"} for label in ("ours", "alone", "control 1", "control 2", "other")]


def table_values(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "seeds": [0, 1],
        "method": "ours",
        "baselines": ["alone"],
        "controls": ["control 1", "control 2"],
        "rows": ROWS,
    } | changes


def make_table(**changes: Any) -> Table:
    return Table.model_validate(table_values(**changes))


@pytest.fixture
def tiny_table(tmp_path) -> Table:
    """Two rows of recipes that run in a second."""
    alone, ours = tmp_path / "alone.yaml", tmp_path / "ours.yaml"
    small = {"data": {"name": "digits", "train_limit": 60, "test_limit": 30, "public_holdout": 20}}
    alone.write_text(yaml.safe_dump(tiny_values(**small)))
    ours.write_text(yaml.safe_dump(tiny_values(**small, **(ALIGNED | {"architectures": ["small_convnet"]}))))
    rows = [{"label": "ours", "recipe": str(ours)}, {"label": "Alone!", "recipe": str(alone)}]
    return make_table(baselines=["Alone!"], controls=[], rows=rows)


# Reading


@pytest.mark.parametrize("name", table_names())
def test_every_cell_of_the_shipped_tables_is_a_valid_recipe(name):
    table = load_table(name)
    data = table.settings.get("data", {})
    # such a table is run with the path on the command line
    path = ["data.path=images.npz"] if data.get("name") == "npz" and "path" not in data else []
    for row in table.rows:
        recipe = cell_recipe(table, row, 5, ["rounds=7", *path])
        assert (recipe.name, recipe.seed, recipe.rounds) == (row.label, 5, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds: "),
        ({"seeds": [1, 1]}, "seeds must be different numbers from 0 on"),
        ({"seeds": [-1]}, "seeds must be different numbers from 0 on"),
        ({"metrics": ["accuracy"]}, "metrics.0: .*'knn'.*got 'accuracy'"),
        ({"method": "theirs"}, "method names 'theirs', which is no row's label; labels are ours, alone"),
        ({"baselines": ["x"]}, "baselines names 'x'"),
        ({"controls": ["x"]}, "controls names 'x'"),
        ({"paper": {"x": {"knn": "90.1"}}}, "paper names 'x'"),
        ({"baselines": ["ours"]}, "'ours' may stand only once"),
        ({"rows": []}, "rows: "),
        (
            {"rows": [*ROWS, {"label": "Control-1", "recipe": "a"}]},
            "'control 1' and 'Control-1' need labels that differ",
        ),
        ({"rows": [*ROWS, {"label": "untrained", "recipe": "a"}]}, "'untrained' is the label of"),
        (
            {"rows": [{"label": "ours", "recipe": "a", "sets": {}}]},
            "rows.0.sets: unknown key; .*label, recipe, settings",
        ),
        ({"control": ["x"]}, "control: unknown key; did you mean controls"),
        ({"name": "../up"}, "name: "),
    ],
)
def test_a_bad_table_is_refused_in_one_line(changes, message, tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(table_values(**changes)))
    with pytest.raises(UserError, match=message) as error:
        load_table(path)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no table 'digits_dem': did you mean digits_demo"):
        load_table("digits_dem")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(UserError, match="must hold a mapping of table keys, it holds list"):
        load_table(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("{")
    with pytest.raises(UserError, match="is not YAML"):
        load_table(tmp_path / "bad.yaml")


def test_settings_are_merged_and_lists_replaced(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(tiny_values(**ALIGNED)))
    row = {
        "label": "ours",
        "recipe": str(base),
        "settings": {"training": {"batch_size": 6}, "architectures": ["small_convnet_wide"]},
    }
    table = make_table(
        baselines=[],
        controls=[],
        rows=[row],
        settings={"training": {"batch_size": 4, "learning_rate": 0.5}, "rounds": 9},
    )
    recipe = cell_recipe(table, table.rows[0], 3, ["rounds=1", "regularizers.0.weight=0.25"])
    assert recipe.training.batch_size == 6
    assert recipe.training.learning_rate == 0.5
    assert recipe.training.local_epochs == 1
    assert recipe.architectures == ["small_convnet_wide"]
    assert recipe.rounds == 1
    assert recipe.regularizers[0].model_dump()["weight"] == 0.25


def test_another_part_does_not_inherit_the_old_parts_options(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(tiny_values()))
    row = {"label": "ours", "recipe": str(base), "settings": {"objective": {"name": "simsiam"}}}
    table = make_table(baselines=[], controls=[], rows=[row])
    assert cell_recipe(table, table.rows[0], 0).objective.name == "simsiam"


def test_overrides_do_not_leak_into_the_table(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(tiny_values(**ALIGNED)))
    settings = {"regularizers": [{"name": "cka_alignment", "weight": 2.0, "batch_size": 16}]}
    table = make_table(baselines=[], controls=[], rows=[{"label": "ours", "recipe": str(base)}], settings=settings)
    cell_recipe(table, table.rows[0], 0, ["regularizers.0.weight=5"])
    assert cell_recipe(table, table.rows[0], 0).regularizers[0].model_dump()["weight"] == 2.0


def test_a_bad_cell_names_its_row_before_anything_runs(tiny_table, tmp_path):
    for override, message in [
        ("round=3", "row 'ours': .*round: unknown key"),
        ("regularizers.0.weight=1", r"row 'Alone!': .*regularizers"),
        ("seed=3", "a table sets seed itself"),
        ("name=x", "a table sets name itself"),
    ]:
        with pytest.raises(UserError, match=message):
            run_table(tiny_table, tmp_path / "out", [override])
    for arguments, message in [
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [-1]}, "seeds"),
    ]:
        with pytest.raises(UserError, match=message):
            run_table(tiny_table, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


# Judging


def results(knn: dict[str, list[float]], linear: dict[str, list[float]] | None = None, start: float = 10.0) -> Results:
    """Values by label and seed; linear is far above everywhere for the method where not given."""
    linear = linear or {label: [90.0 + 5 * (label == "ours") + s for s in (0, 1)] for label in knn}
    after = {label: {"knn": dict(enumerate(knn[label])), "linear": dict(enumerate(linear[label]))} for label in knn}
    before = {label: {m: {0: start, 1: start + 1} for m in ("knn", "linear")} for label in knn}
    return Results(before, after)


def knn_verdict(ours: list[float], *, table: Table | None = None, **rivals: list[float]) -> str:
    knn = {
        "ours": ours,
        "alone": [50.0, 52.0],
        "control 1": [50.0, 52.0],
        "control 2": [50.0, 52.0],
        "other": [99.0, 99.0],
    }
    knn |= {label.replace("_", " "): values for label, values in rivals.items()}
    return verdict(table or make_table(), results(knn)).splitlines()[0]


def test_a_gain_is_said_where_every_baseline_and_control_is_beaten_beyond_the_spread():
    # each spread is sqrt(2), so a lead must be more than 2.83
    assert knn_verdict([53.0, 55.0]) == (
        "kNN accuracy: a collaboration gain. ours with 54.0 ± 1.4 beats every baseline and every control by more than "
        "the spread: alone by 3.0, control 1 by 3.0 and control 2 by 3.0."
    )


def test_a_lead_within_the_spread_is_no_gain():
    assert knn_verdict([53.0, 55.0], control_2=[51.0, 53.0]) == (
        "kNN accuracy: no collaboration gain. ours with 54.0 ± 1.4 does not beat control 2 (2.0 above, within the "
        "spread of 2.8). It beats alone by 3.0 and control 1 by 3.0."
    )


def test_a_lead_equal_to_the_spread_is_no_gain():
    # three seeds one apart have a spread of exactly 1, so a lead must be more than 2
    rivals = {label: [49.0, 50.0, 51.0] for label in ("alone", "control_1", "control_2")}
    table = make_table(seeds=[0, 1, 2])
    linear = [1.0, 2.0, 3.0]
    for lead, gain in ((2.0, False), (2.0001, True)):
        knn = {"ours": [49 + lead, 50 + lead, 51 + lead]} | {k.replace("_", " "): v for k, v in rivals.items()}
        text = verdict(table, results(knn, dict.fromkeys(knn, linear)))
        assert (": a collaboration gain" in text) == gain
        assert text.count("no collaboration gain") == 2 - gain


def test_a_baseline_alone_can_deny_the_gain():
    assert knn_verdict([53.0, 55.0], alone=[60.0, 60.0]) == (
        "kNN accuracy: no collaboration gain. ours with 54.0 ± 1.4 does not beat alone (6.0 below). "
        "It beats control 1 by 3.0 and control 2 by 3.0."
    )


def test_a_method_that_beats_nobody():
    assert knn_verdict([40.0, 40.0], control_1=[40.0, 41.0], control_2=[40.0, 40.0]) == (
        "kNN accuracy: no collaboration gain. ours with 40.0 ± 0.0 does not beat alone (11.0 below), control 1 "
        "(0.5 below, within the spread of 0.7) and control 2 (less than 0.1 away, within the spread of less than 0.1)."
    )


def test_other_rows_do_not_enter_the_verdict():
    with_other, without = knn_verdict([53.0, 55.0]), knn_verdict([53.0, 55.0], other=[0.0, 0.0])
    assert with_other == without
    assert "other" not in with_other


def test_each_metric_is_judged_for_itself():
    knn = {label: [50.0, 52.0] for label in ("ours", "alone", "control 1", "control 2")}
    first, second = verdict(make_table(), results(knn)).splitlines()
    assert first.startswith("kNN accuracy: no collaboration gain")
    assert second.startswith("Linear accuracy: a collaboration gain")
    table = make_table(metrics=["linear", "effective_rank"])
    assert verdict(table, results(knn)) == second


def test_a_method_not_above_the_untrained_encoder_is_told():
    table = make_table(metrics=["knn"])
    knn = {"ours": [53.0, 55.0], "alone": [1.0, 1.0], "control 1": [1.0, 1.0], "control 2": [1.0, 1.0]}
    text = verdict(table, results(knn, start=60.0))
    assert text.startswith("kNN accuracy: a collaboration gain.")
    assert text.endswith("It is not above the untrained encoder (60.5 ± 0.7).")
    assert "untrained" not in verdict(table, results(knn, start=40.0))


def test_without_spread_controls_or_all_runs_nothing_is_said():
    undecided = "kNN accuracy: nothing can be said about a collaboration gain: "
    assert knn_verdict([90.0], table=make_table(seeds=[0])) == undecided + (
        "one seed has no spread, at least two are needed."
    )
    assert knn_verdict([90.0, 90.0], table=make_table(controls=[])) == undecided + "the table has no controls."
    assert knn_verdict([90.0, 90.0], table=make_table(baselines=[])) == undecided + "the table has no baselines."
    assert knn_verdict([90.0, 90.0], control_1=[1.0]) == undecided + "runs of control 1 are missing."
    assert knn_verdict([90.0], alone=[]) == undecided + "runs of ours and alone are missing."
    assert verdict(make_table(method=None), results({})) == ""


# Writing


def test_the_table_has_the_untrained_row_first_and_the_papers_figures_beside(tmp_path, tiny):
    table = make_table(paper={"ours": {"knn": "71.2"}}, metrics=["knn", "effective_rank"])
    for row in table.rows[:2]:
        for seed in table.seeds:
            after = 50.0 + 2 * seed + (row.label == "ours")
            rows = evaluated(0, "knn", [40.0, 42.0]) + evaluated(2, "knn", [after - 1, after + 1])
            write_run(tmp_path / row.label / f"seed-{seed}", tiny(name=row.label, seed=seed), rows)
    found = tables.read_results(table, tmp_path)
    lines = [line.split() for line in format_table(table, found).splitlines()]
    assert lines[0] == ["kNN", "%", "in", "the", "paper", "effective", "rank"]
    assert lines[2] == ["untrained", "41.0", "±", "0.0", "-"]
    assert lines[3] == ["ours", "52.0", "±", "1.4", "71.2", "-"]
    assert lines[4] == ["alone", "51.0", "±", "1.4", "-"]
    assert lines[5] == ["control", "1", "-", "-"]
    long = make_table(rows=[*ROWS, {"label": "a label of " + "many " * 9 + "words", "recipe": "local_only"}])
    text = format_table(long, found)
    assert max(map(len, text.splitlines())) <= 80
    assert "words" in text


# Running


def states(output: Path) -> dict[str, bytes]:
    """All runs' files, without wall-clock times."""
    files = [f for f in sorted(output.glob("*/seed-*/**/*")) if f.is_file() and "tensorboard" not in f.parts]
    return {str(f.relative_to(output)): f.read_bytes() for f in files if f.name != "timings.csv"}


def test_a_table_is_run_and_not_run_again(tiny_table, tmp_path, monkeypatch):
    lines: list[str] = []
    output = run_table(tiny_table, tmp_path / "out", ["training.learning_rate=0.05"], note=lines.append)
    assert output == tmp_path / "out"
    for row, folder in zip(tiny_table.rows, ("ours", "alone"), strict=True):
        for seed in (0, 1):
            directory = RunDirectory.open(output / folder / f"seed-{seed}")
            assert directory.checkpoint.finished
            stored = yaml.safe_load((directory.path / "recipe.yaml").read_text())
            assert (stored["name"], stored["seed"], stored["training"]["learning_rate"]) == (row.label, seed, 0.05)
    with open(output / "table.csv", newline="") as file:
        found = {(r["row"], r["seed"], r["metric"]): float(r["value"]) for r in csv.DictReader(file)}
    metrics = ("knn", "linear", "effective_rank")
    assert found.keys() == {(w, s, m) for w in ("untrained", "ours", "Alone!") for s in "01" for m in metrics}
    last = {(r, w, m): v for r, w, m, v in RunDirectory.open(output / "ours" / "seed-1").read_metrics()}
    assert found["ours", "1", "knn"] == last[2, "mean", "knn"]
    assert found["untrained", "1", "linear"] == last[0, "mean", "linear"]
    assert (output / "picture.png").read_bytes().startswith(b"\x89PNG")
    page = (output / "table.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    markdown = (output / "table.md").read_text(encoding="utf-8")
    assert "| Alone! | baseline |" in markdown
    # no controls in this table, and it must say so wherever the verdict stands
    for text in ("\n".join(lines), page, markdown):
        assert "nothing can be said about a collaboration gain: the table has no controls." in text
    assert [line[:3] for line in lines[1:5]] == ["1/4", "2/4", "3/4", "4/4"]

    before = states(output)
    monkeypatch.setattr(tables.in_process, "run", None)
    monkeypatch.setattr(tables.in_process, "resume", None)
    (output / "table.md").unlink()
    run_table(tiny_table, output, ["training.learning_rate=0.05"])
    assert states(output) == before
    assert (output / "table.md").read_text(encoding="utf-8") == markdown


def test_cells_of_another_recipe_are_not_mixed_in(tiny_table, tmp_path):
    run_table(tiny_table, tmp_path / "out", ["rounds=1"], seeds=[0])
    before = states(tmp_path / "out")
    with pytest.raises(UserError, match=r"seed-0 was made with rounds=1, now it is 2: name another output"):
        run_table(tiny_table, tmp_path / "out")
    with pytest.raises(UserError, match=r"was made with training.batch_size=8, now it is 4"):
        run_table(tiny_table, tmp_path / "out", ["rounds=1", "training.batch_size=4"])
    assert states(tmp_path / "out") == before


def test_a_folder_with_other_things_is_refused(tiny_table, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"is not empty and holds no table.yaml"):
        run_table(tiny_table, tmp_path / "home")
    with pytest.raises(UserError, match="is a file"):
        run_table(tiny_table, tmp_path / "home" / "letter.txt")
    assert [f.name for f in (tmp_path / "home").iterdir()] == ["letter.txt"]


def test_a_stopped_table_continues_where_it_was(tiny_table, tmp_path, monkeypatch):
    run_table(tiny_table, tmp_path / "undisturbed")
    rounds = 0
    inner = tables._Rounds.round_done

    def stop_in_the_second_cell(self, round_number, metrics):
        nonlocal rounds
        inner(self, round_number, metrics)
        rounds += 1
        if rounds == 5:  # a cell has rounds 0, 1 and 2
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables._Rounds, "round_done", stop_in_the_second_cell)
        with pytest.raises(KeyboardInterrupt):
            run_table(tiny_table, tmp_path / "stopped")
    assert RunDirectory.open(tmp_path / "stopped" / "ours" / "seed-1").checkpoint.round == 1
    lines: list[str] = []
    run_table(tiny_table, tmp_path / "stopped", note=lines.append)
    assert "4 runs, 1 of them finished already" in lines[0]
    assert states(tmp_path / "stopped") == states(tmp_path / "undisturbed")


def add_failing_row(table: Table, tmp_path: Path) -> Table:
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump(tiny_values(training={"batch_size": 5000})))
    rows = [{"label": "bad", "recipe": str(bad)}, *(row.model_dump() for row in table.rows)]
    return Table.model_validate(table.model_dump() | {"rows": rows, "controls": ["bad"], "seeds": [4]})


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failing_cell_is_named_and_the_others_go_on(jobs, tiny_table, tmp_path):
    table = add_failing_row(tiny_table, tmp_path)
    lines: list[str] = []
    with pytest.raises(UserError, match=r"^1 of 3 runs failed: bad, seed 4: client 0 has \d+ images") as error:
        run_table(table, tmp_path / "out", ["rounds=1"], jobs=jobs, note=lines.append)
    assert "\n" not in str(error.value)
    assert any("bad, seed 4: failed: client 0 has" in line for line in lines)
    with open(tmp_path / "out" / "table.csv", newline="") as file:
        assert {row["row"] for row in csv.DictReader(file)} == {"untrained", "ours", "Alone!"}
    assert "runs of bad are missing" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")


def alive(group: int) -> bool:
    """Whether a process of the group runs (a zombie does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_stopped_table_and_the_same_command_continues(how, tiny_table, tmp_path):
    """Ctrl-C reaches the whole process group, as from a terminal; SIGKILL only the parent."""
    path, output = tmp_path / "table.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(tiny_table.model_dump()))
    # many rounds, so that both workers are in the middle of a cell
    command = [
        sys.executable,
        "-m",
        "fedssl",
        "run-table",
        str(path),
        "rounds=5000",
        "--output",
        str(output),
        "--jobs",
        "2",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    cells = [output / "ours" / f"seed-{seed}" for seed in (0, 1)]
    deadline = time.monotonic() + 120
    while not all((cell / "checkpoints" / "manifest.json").exists() for cell in cells) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    printed, errors = process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(process.pid)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command continues" in printed
        assert errors == ""
    reached = [RunDirectory.open(cell).checkpoint.round for cell in cells]
    assert min(reached) >= 0
    assert max(reached) < 5000
    told: list[int] = []

    def stop(self, round_number, metrics):
        told.append(round_number)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables._Rounds, "round_done", stop)
        with pytest.raises(KeyboardInterrupt):
            run_table(tiny_table, output, ["rounds=5000"])
    assert told == [reached[0] + 1]
