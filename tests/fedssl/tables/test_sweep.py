"""A sweep: equally many trials of each row, chosen on a part of the training images, then the table with new seeds."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.errors import UserError
from fedssl.run_folder.record import read_run
from fedssl.tables.results import Results
from fedssl.tables.runner import table_cells
from fedssl.tables.sweep import drawn, run_sweep, trials_of
from fedssl.tables.table import Sweep, load_table
from tests.fedssl.conftest import AVERAGED, tiny_values

RATES = [1e-3, 2e-3, 1e-2]


def write(folder: Path, sweep: dict[str, Any], **changes: Any) -> Path:
    """A sweep of two rows that run in a second each."""
    recipe = tiny_values(**AVERAGED, rounds=1, evaluation={"linear": {"epochs": 1}})
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    values = {
        "name": "swept",
        "seeds": [1],
        "metrics": ["knn"],
        "rows": [{"label": label, "recipe": "tiny.yaml"} for label in ("one", "other")],
        "sweep": {"trials": 2, "ranges": {"training.learning_rate": RATES}} | sweep,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def test_the_winner_of_equally_many_trials_is_run_with_the_tables_seeds(fedssl, tmp_path):
    own = {"other": {"evaluation.images": [40]}}
    diverging = {"training.learning_rate": [1e-3, 1e30]}
    judged = {"seeds": [1, 2], "method": "one", "verdict": "comparison", "baselines": ["other"]}
    judged["settings"] = {"data": {"validation_fraction": 0.3}}  # of the trials
    file = write(tmp_path, {"own_ranges": own, "ranges": diverging, "draw": "grid"}, **judged)
    code, out, _ = fedssl("sweep", str(file), "--output", "out", "--part", "1", "2")  # as a task of an array does
    assert code == 0
    assert "swept-trials: 2 runs, 0 of them finished already" in out
    assert not (tmp_path / "out" / "winners").exists()
    assert not (tmp_path / "out" / "trials" / "table.md").exists()
    out = fedssl("sweep", str(file), "--output", "out")[1]
    assert out.endswith("Next: fedssl report out/winners/one/seed-1\n")

    for row in ("one", "other"):
        trials = [read_run(tmp_path / "out" / "trials" / f"{row}-{number}" / "seed-0") for number in range(2)]
        assert [run.recipe["training"]["learning_rate"] for run in trials] == [1e-3, 1e30]
        assert [run.finished for run in trials] == [True, False]
        winner = read_run(tmp_path / "out" / "winners" / row / "seed-1").recipe
        assert winner["training"]["learning_rate"] == 1e-3
        assert winner["data"]["validation_fraction"] == 0
        assert winner["evaluation"]["images"] == (40 if row == "other" else None)
    assert any("one 1, seed 0: " in line and "a trial that failed is not chosen" in line for line in out.splitlines())
    assert any(line.startswith("other: trial 0 is the best of 1, knn ") for line in out.splitlines())
    page = (tmp_path / "out" / "winners" / "table.md").read_text()
    assert re.search(r"kNN accuracy \(2 seeds\): one with \S+ ± \S+ is tied with other", page)  # a tie by construction


def test_the_best_value_wins_and_of_equal_ones_the_first(tmp_path, monkeypatch):
    table = load_table(write(tmp_path, {"trials": 3, "draw": "grid"}))
    ran = []
    monkeypatch.setattr("fedssl.tables.sweep.run_table", lambda table, *rest: ran.append(table))
    values = {("one 0", "knn"): {0: 50.0}, ("one 1", "knn"): {0: float("nan")}, ("one 2", "knn"): {0: 51.0}}
    values |= {(f"other {number}", "knn"): {0: 50.0} for number in range(3)}
    monkeypatch.setattr("fedssl.tables.sweep.read_results", lambda *given: Results(after=values))
    run_sweep(table, tmp_path, [], 1, lambda text: None)
    for override in ("training.learning_rate=0.5", "training={batch_size: 6}"):
        with pytest.raises(UserError, match="would replace what the sweep draws: leave it out"):
            run_sweep(table, tmp_path, [override], 1, lambda text: None)
    with pytest.raises(UserError, match=r"leave data\.validation_fraction=0 out"):
        run_sweep(table, tmp_path, ["data.validation_fraction=0"], 1, lambda text: None)
    assert [row.settings["training"]["learning_rate"] for row in ran[-1].rows] == [RATES[2], RATES[0]]
    np.savez(tmp_path / "a.npz", x_train=np.zeros((90, 8, 8), np.uint8), x_test=np.zeros((9, 8, 8), np.uint8))
    unlabelled = ["data.name=npz", f"data.path={tmp_path / 'a.npz'}", "partition={name: iid, clients: 3}"]
    with pytest.raises(UserError, match=r"images without labels have no knn: set sweep\.metric to view_retrieval"):
        run_sweep(table, tmp_path, unlabelled, 1, lambda text: None)
    few = load_table(write(tmp_path, {"metric": "linear_0.01"}))
    with pytest.raises(UserError, match=r"linear_0\.01 is not measured: add 0\.01 to evaluation\.few_labels"):
        run_sweep(few, tmp_path, ["evaluation.few_labels=[0.1]"], 1, lambda text: None)
    for label in ("other 0", "other 1", "other 2"):
        del values[label, "knn"]
    with pytest.raises(UserError, match="no trial of row 'other' has a value of knn"):
        run_sweep(table, tmp_path, [], 1, lambda text: None)


def test_what_is_drawn_depends_on_seed_row_and_number_alone(tmp_path):
    ranges = {"training.learning_rate": list(np.arange(1.0, 1000.0)), "rounds": list(range(1, 1000))}
    few, many = (Sweep(trials=trials, ranges=ranges) for trials in (2, 9))
    assert [drawn(few, "one", number) for number in range(2)] == [drawn(many, "one", number) for number in range(2)]
    different = [drawn(many, "one", 0), drawn(many, "other", 0), drawn(many, "one", 1)]
    different.append(drawn(many.model_copy(update={"seed": 1}), "one", 0))
    assert len({tuple(values.values()) for values in different}) == 4
    trials = trials_of(load_table(write(tmp_path, {"ranges": {"data.class_names": [["😀"]]}})))
    assert trials.rows[0].settings == {"data": {"class_names": ["😀"]}}
    assert [row.label for row in trials.rows] == ["one 0", "other 0", "one 1", "other 1"]
    assert trials.seeds == [0]
    assert trials.settings["data"] == {"validation_fraction": 0.2}


@pytest.mark.parametrize(
    ("sweep", "changes", "match"),
    [
        ({"draw": "grid"}, {}, "the grid of row 'one' has 3 points, but trials is 2, and all rows get as many"),
        ({"seed": 1}, {}, "sweep: the table must have no scenarios, no oracles, and other seeds than the sweep's"),
        ({}, {"scenarios": [{"label": "a"}]}, "sweep: the table must have no scenarios"),
        ({}, {"settings": {"data": "digits"}}, "data"),
        ({}, {"settings": {"data": None}}, "data"),
        ({"own_ranges": {"third": {}}}, {}, "own_ranges names 'third', but the rows' labels are one, other"),
        ({"ranges": {"rounds": []}}, {}, "sweep.ranges.rounds"),
        ({"ranges": {"objective.name": ["./mine.py"]}}, {}, "names the part .*/mine.py, whose code would be run"),
        ({"ranges": {"objective": [{"name": "./mine.py"}]}}, {}, "names the part .*/mine.py, whose code would be run"),
    ],
)
def test_refusals(tmp_path, sweep, changes, match):
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(UserError, match=match):
        table_cells(trials_of(load_table(write(tmp_path, sweep, **changes))), tmp_path / "out")


def test_validation_images_are_training_images_and_no_test_image_is_read():
    whole = load_dataset(DataOptions(), 0)
    part, again = (load_dataset(DataOptions(validation_fraction=0.25, public_holdout=9), seed) for seed in (0, 5))
    assert len(part.test_images) == 360
    assert len(part.test_images) + len(part.train_images) + 9 == len(whole.train_images)
    assert (part.test_images == again.test_images).all()
    training = {image.numpy().tobytes() for image in whole.train_images}
    assert {image.numpy().tobytes() for image in part.test_images} <= training
    held, kept = ({image.numpy().tobytes() for image in images} for images in (part.test_images, part.train_images))
    assert not held & kept
