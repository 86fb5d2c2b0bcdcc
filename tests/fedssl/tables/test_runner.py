"""Running a table: whole, in worker processes, stopped at any moment and continued."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from fedssl.engines import in_process, rounds
from fedssl.errors import UserError
from fedssl.run_folder.directory import RunDirectory
from fedssl.tables import runner
from fedssl.tables.runner import run_table
from fedssl.tables.table import Table, cell_path
from tests.fedssl.conftest import ALIGNED, tiny_values
from tests.fedssl.engines.flower.deployment import MARK, marked, poll
from tests.fedssl.reports.synthetic_runs import make_table

#: rounds enough that a cell is stopped in its middle
MANY = 5000
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def images(noisy, tmp_path_factory) -> Path:
    """Images of noise that these tests alone read, and change."""
    return Path(shutil.copy(noisy().data.path, tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def tiny_recipe(images) -> Callable[..., str]:
    """Write a recipe that runs in a second, with top-level keys replaced; gives its path."""
    data = {"name": "npz", "path": str(images), "public_holdout": 20, "train_limit": 60, "test_limit": 30}
    partition = {"name": "disjoint_classes", "clients": 2, "classes_per_client": 5}

    def write(name: str, **changes: Any) -> str:
        path = images.with_name(f"{name}.yaml")
        path.write_text(yaml.safe_dump(tiny_values(data=data, partition=partition, **changes)))
        return str(path)

    return write


@pytest.fixture(scope="module")
def tiny_table(tiny_recipe) -> Table:
    """Two rows of recipes that run in a second."""
    ours, alone = tiny_recipe("ours", **(ALIGNED | {"architectures": ["small_convnet"]})), tiny_recipe("alone")
    rows = [{"label": "ours", "recipe": ours}, {"label": "Alone!", "recipe": alone}]
    return make_table(baselines=["Alone!"], controls=[], rows=rows)


@pytest.fixture(scope="module")
def bad_row(tiny_recipe) -> dict[str, Any]:
    """A row whose cells are refused when they are run, not before."""
    return {"label": "bad", "recipe": tiny_recipe("bad", training={"batch_size": 5000})}


CHANGES = ["training.learning_rate=0.05"]


@pytest.fixture(scope="module")
def ran(tiny_table, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of the finished table, which is only read, and what was told meanwhile."""
    lines: list[str] = []
    output = tmp_path_factory.mktemp("tables") / "out"
    run_table(tiny_table, output, CHANGES, note=lines.append)
    return output, lines


@pytest.fixture
def copied(ran, tmp_path) -> Path:
    """A copy of the finished table's folder."""
    return Path(shutil.copytree(ran[0], tmp_path / "out"))


def states(output: Path, seed: str = "*", *left_out: str) -> dict[str, bytes]:
    """All runs' files, without wall-clock times and files of the names that are left out."""
    files = [f for f in sorted(output.glob(f"*/seed-{seed}/**/*")) if f.is_file() and "tensorboard" not in f.parts]
    return {str(f.relative_to(output)): f.read_bytes() for f in files if f.name not in ("timings.csv", *left_out)}


def require_refusal(message: str, table: Table, output: Path, *overrides: str) -> None:
    """The table is not continued, and its folder stays as it is."""
    before = states(output)
    with pytest.raises(UserError, match=message):
        run_table(table, output, overrides)
    assert states(output) == before


def test_a_bad_cell_names_its_row_before_anything_runs(tiny_table, tmp_path):
    for override, message in [
        ("round=3", "row 'ours': .*round: unknown key"),
        ("regularizers.0.weight=1", r"row 'Alone!': .*regularizers"),
        ("name=x", "a table sets name itself"),
    ]:
        with pytest.raises(UserError, match=message):
            run_table(tiny_table, tmp_path / "out", [override])
    assert not (tmp_path / "out").exists()


def test_a_table_is_run(tiny_table, ran):
    output, lines = ran
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
    # no controls in this table, and it must say so wherever the verdict stands
    for text in ("\n".join(lines), (output / "table.md").read_text(encoding="utf-8")):
        assert "nothing can be said about a collaboration gain: the table has no controls." in text
    assert [line[:3] for line in lines if line[1:3] == "/4"] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_finished_table_is_written_and_not_run_again(tiny_table, copied, monkeypatch):
    """Cells from before an option existed count as made with its default."""
    markdown = (copied / "table.md").read_text(encoding="utf-8")
    for path in copied.glob("*/seed-*/recipe.yaml"):
        recipe = yaml.safe_load(path.read_text())
        assert recipe["training"].pop("deterministic") is False
        path.write_text(yaml.safe_dump(recipe))
    before = states(copied)
    monkeypatch.setattr(in_process, "run", None)
    monkeypatch.setattr(in_process, "resume", None)
    (copied / "table.md").unlink()
    run_table(tiny_table, copied, [*CHANGES, "data.download=true", "data.memory_limit=3"])  # on which nothing depends
    assert states(copied) == before
    assert (copied / "table.md").read_text(encoding="utf-8") == markdown
    message = "was made with training.deterministic=False, now it is True"
    require_refusal(message, tiny_table, copied, *CHANGES, "training.deterministic=true")


def test_cells_of_another_recipe_and_of_other_data_are_not_mixed_in(tiny_table, copied, images):
    require_refusal("was made with rounds=2, now it is 1: name another", tiny_table, copied, *CHANGES, "rounds=1")
    require_refusal("out holds the table small, and not b: name", tiny_table.model_copy(update={"name": "b"}), copied)
    kept = images.read_bytes()
    with np.load(images) as arrays:
        changed = {name: values[::-1] for name, values in arrays.items()}
    np.savez(images, **changed)
    message = "have changed since the run began: client 0 no longer has the same images"
    require_refusal(message, tiny_table, copied, *CHANGES)
    images.write_bytes(kept)


def test_a_finished_table_with_a_teacher_is_not_run_again(tiny_recipe, teacher, images, tmp_path, monkeypatch):
    """A run records its teacher's digest and width, and percentiles as numbers; another teacher is refused."""
    with np.load(images) as arrays:
        np.savez(tmp_path / "deep.npz", **{name: values.astype(np.uint16) * 9 for name, values in arrays.items()})
    deep = [f"data.path={tmp_path / 'deep.npz'}", "data.window=percentiles"]
    taught = tiny_recipe("taught", objective={"name": "distillation", "teacher": str(teacher)})
    table = make_table(seeds=[0], method=None, baselines=[], controls=[], rows=[{"label": "taught", "recipe": taught}])
    run_table(table, tmp_path / "out", deep)
    monkeypatch.setattr(in_process, "run", None)
    run_table(table, tmp_path / "out", deep)
    other = shutil.copytree(teacher, tmp_path / "other")
    message = rf"made with objective\.teacher={teacher}, now it is {other}"
    require_refusal(message, table, tmp_path / "out", *deep, f"objective.teacher={other}")


def test_a_cell_that_its_patience_ended_is_told_and_counts_when_it_has_gone_on(tiny_table, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "evaluate_after", lambda *_: ({"view_retrieval": 9.0, "knn": 9.0}, np.ones(1)))
    table = tiny_table.model_copy(update={"seeds": [0], "method": None, "rows": tiny_table.rows[1:]})
    output, patient = tmp_path / "out", ["rounds=3", "evaluation.every=1", "evaluation.patience=1"]
    with pytest.raises(UserError, match=r"evaluation.patience ended it after round 2 of 3, so it has no result: "):
        run_table(table, output, patient)
    in_process.resume(cell_path(output, "Alone!", 0), overrides=["evaluation.patience=null"])
    run_table(table, output, patient)
    assert "9.0" in (output / "table.md").read_text(encoding="utf-8")


def test_of_a_worker_that_died_only_cells_at_work_fail_and_none_that_waits_for_one():
    calls = {name: futures.Future() for name in "ABCD"}  # the pool calls one more than are at work running
    assert all(call.set_running_or_notify_cancel() for call in calls.values())
    calls["A"].set_result(None)
    dies = property(lambda _: not calls["B"].done() and calls["B"].set_exception(futures.process.BrokenProcessPool()))
    named = type("", (str,), {"path": property(str), "recipe": SimpleNamespace(to_yaml=str), "begun": dies})
    pool, ended = SimpleNamespace(submit=lambda _, __, path: calls[path]), []
    progress = SimpleNamespace(cell_ended=lambda cell, failure: ended.append(cell))
    assert (runner._run_in(pool, list(map(named, "ABCD")), 2, progress), ended) == (["D"], ["A", "B", "C"])


def test_a_folder_with_other_things_is_refused(tiny_table, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"is not empty and holds no table.yaml"):
        run_table(tiny_table, tmp_path / "home")
    with pytest.raises(UserError, match="is a file"):
        run_table(tiny_table, tmp_path / "home" / "letter.txt")
    assert [f.name for f in (tmp_path / "home").iterdir()] == ["letter.txt"]


def test_a_stopped_table_continues_where_it_was(tiny_table, ran, tmp_path, monkeypatch):
    table, output = tiny_table.model_copy(update={"seeds": [0]}), tmp_path / "stopped"
    stop_in_the_second_cell = Mock(side_effect=[None] * 4 + [KeyboardInterrupt])  # a cell has rounds 0, 1 and 2
    with monkeypatch.context() as patch:
        patch.setattr(runner._Rounds, "round_ended", stop_in_the_second_cell)
        with pytest.raises(KeyboardInterrupt):
            run_table(table, output, CHANGES)
    assert RunDirectory.open(cell_path(output, table.rows[1].label, 0)).checkpoint.round == 1
    lines: list[str] = []
    run_table(table, output, CHANGES, note=lines.append)
    assert "2 runs, 1 of them finished already" in lines[0]
    # the manifest has the length of the wall-clock times
    assert states(output, "0", "manifest.json") == states(ran[0], "0", "manifest.json")


def test_a_failing_cell_is_named_and_the_others_go_on(bad_row, tiny_table, tmp_path):
    rows = [bad_row, tiny_table.rows[1].model_dump()]
    table = make_table(method="Alone!", baselines=["bad"], controls=[], verdict="comparison", rows=rows, seeds=[4])
    with pytest.raises(UserError, match=r"^1 of 2 runs failed: bad, seed 4: client 0 has \d+ images") as error:
        run_table(table, tmp_path / "out", ["rounds=1"])
    assert "\n" not in str(error.value)
    with open(tmp_path / "out" / "table.csv", newline="") as file:
        assert {row["row"] for row in csv.DictReader(file)} == {"untrained", "Alone!"}
    assert "runs of bad are missing" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"^1 of 2 runs failed: bad, seed 4"):
        run_table(table, tmp_path / "out", ["rounds=1"])  # tried again


def test_a_cell_for_which_memory_does_not_suffice_stops_no_other(bad_row, tiny_table, tmp_path, monkeypatch):
    train = Mock(side_effect=[MemoryError("8 GB"), in_process.run])
    monkeypatch.setattr(runner, "engine_of", lambda recipe: SimpleNamespace(run=lambda *given: train()(*given)))
    rows = [bad_row, tiny_table.rows[1].model_dump()]
    table = make_table(method="Alone!", baselines=["bad"], controls=[], verdict="comparison", rows=rows, seeds=[4])
    with pytest.raises(UserError, match=r"^1 of 2 runs failed: bad, seed 4: the memory does not suffice \(8 GB\)"):
        run_table(table, tmp_path / "out", ["rounds=1"])


def stop_in_the_middle(
    table: Table, folder: Path, labels: Sequence[str], stop: Callable[[subprocess.Popen[str]], None], told: str = ""
) -> tuple[int, str, str]:
    """Run a table with two jobs; `stop` it when the rows' first cells have begun and `told` is printed.

    No process may be left. Gives the exit code and what was printed, to standard output and to standard error. Then the
    table is continued: the first of the cells must go on at the round after its last one.
    """
    path, output = folder / "table.yaml", folder / "out"
    path.write_text(yaml.safe_dump(table.model_dump()))
    command = [sys.executable, "-m", "fedssl", "run-table", str(path), "--output", str(output), "--jobs", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: f"{folder}/"}
    with open(folder / "printed", "w") as printed:
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=printed, stderr=subprocess.PIPE, text=True
        )
    cells = [cell_path(output, label, table.seeds[0]) for label in labels]

    def begun(cell: Path) -> bool:
        assert process.poll() is None, process.communicate()
        return (cell / "recipe.yaml").exists() and RunDirectory.open(cell).checkpoint.round >= 0

    printed_text = (folder / "printed").read_text
    poll(lambda: all(map(begun, cells)) and told in printed_text(), "the cells have begun", seconds=120, pause=0.05)
    stop(process)
    errors = process.communicate(timeout=60)[1]
    poll(lambda: not marked(f"{folder}/"), "no process is left", seconds=30)
    reached = [RunDirectory.open(cell).checkpoint.round for cell in cells]
    assert min(reached) >= 0
    assert max(reached) < MANY
    ended = Mock(side_effect=KeyboardInterrupt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._Rounds, "round_ended", ended)
        with pytest.raises(KeyboardInterrupt):
            run_table(table, output)
    assert [call.args[0] for call in ended.call_args_list] == [reached[0] + 1]
    return process.returncode, printed_text(), errors


@needs_proc
def test_ctrl_c_ends_all_processes_and_the_same_command_continues(bad_row, tiny_table, tmp_path):
    """Both workers take a long cell after their first one, of which one fails and the other is done at once."""
    ours, alone = (row.model_dump() | {"settings": {"rounds": MANY}} for row in tiny_table.rows)
    quick = ours | {"label": "quick", "settings": {"rounds": 1}}
    table = make_table(baselines=[], controls=[], rows=[bad_row, quick, ours, alone], seeds=[0])
    code, printed, errors = stop_in_the_middle(
        table, tmp_path, ["ours", "Alone!"], lambda process: os.killpg(process.pid, signal.SIGINT), "quick, seed 0: knn"
    )  # the whole process group, as from a terminal
    assert code == 130
    assert "the same command continues" in printed
    assert errors == ""
    assert re.search(r"^\d/4  bad, seed 0: failed: client 0 has", printed, re.MULTILINE)
    assert re.search(r"^\d/4  quick, seed 0: knn \d+\.\d, linear \d+\.\d", printed, re.MULTILINE)


@needs_proc
def test_a_killed_tables_worker_ends_and_the_same_command_continues(tiny_table, tmp_path):
    row = tiny_table.rows[0].model_dump() | {"settings": {"rounds": MANY}}
    table = make_table(baselines=[], controls=[], rows=[row], seeds=[0])
    stop_in_the_middle(table, tmp_path, ["ours"], lambda process: process.kill())
