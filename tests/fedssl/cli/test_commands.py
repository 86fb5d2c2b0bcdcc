"""The command line as a stranger meets it: one-line errors, exit code 2, nothing half-written."""

from __future__ import annotations

import csv
import importlib.metadata
import re
from pathlib import Path

import pytest

from fedssl.errors import installed_distribution
from fedssl.recipe.reading import parse_recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.cli.test_attacks import one_line, recipe_text
from tests.fedssl.conftest import ALIGNED, tiny_values


def test_run_evaluate_report_and_resume(fedssl, tmp_path):
    """`fedssl evaluate` repeats the run's own final figures."""
    (tmp_path / "tiny.yaml").write_text(parse_recipe(tiny_values(**ALIGNED)).to_yaml())
    folder = tmp_path / "runs" / "tiny-seed0"
    code, out, _ = fedssl("run", "tiny.yaml", "rounds=1")
    assert code == 0
    assert "kNN %" in out
    assert "fedssl report runs/tiny-seed0" in out
    code, out, _ = fedssl("evaluate", "runs/tiny-seed0", "--semi-supervised", "0.1")
    assert code == 0
    assert "semi_supervised_0.1" in out
    with open(folder / "evaluation.csv", newline="") as file:
        evaluated = {row.pop("client"): row for row in csv.DictReader(file)}
    assert list(evaluated) == ["0", "1", "2", "mean"]
    assert list(evaluated["0"]) == ["knn", "effective_rank", "linear", "semi_supervised_0.1"]
    logged = {
        (who, name): value for number, who, name, value in RunDirectory.open(folder).read_metrics() if number == 1
    }
    for who, row in evaluated.items():
        for name in ("knn", "effective_rank", "linear"):
            assert float(row[name]) == pytest.approx(logged[who, name], abs=0.006)
    assert fedssl("report", "runs/tiny-seed0")[0] == 0
    page = (folder / "report.html").read_text()
    assert "Collapse of the representations" in page
    assert "Images as the encoder sees them" in page
    assert fedssl("run", "--resume", "runs/tiny-seed0")[0] == 0


def test_lists_and_partition(fedssl, tmp_path):
    assert "hetero_ssfl" in fedssl("recipes")[1]
    assert "digits_demo" in fedssl("tables")[1]
    assert "torch" in fedssl("doctor")[1]
    assert fedssl("--version")[1] == f"fedssl {importlib.metadata.version(installed_distribution())}\n"
    code, out, _ = fedssl("partition", "hetero_ssfl", "--chart", "chart.png")
    assert code == 0
    assert "total" in out.lower()
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name a recipe"),
        (["run", "heterossfl"], "did you mean hetero_ssfl?"),
        (["run", "--resume", "nowhere"], "nowhere is not a run's folder"),
        (["run", "rounds=9", "--resume", "nowhere"], "--resume takes only the run's folder and clients_parallel=N"),
        (["run", "clients_parallel=0", "--resume", "nowhere"], "clients_parallel must be a whole number of at least 1"),
        (["run", "--resume", "nowhere", "--overwrite"], "--resume takes neither --output nor --overwrite"),
        (["run", "hetero_ssfl", "data.name=npz", "data.path=none.npz"], "none.npz"),
        (["run", "local_only", "training.batch_size=5000"], "fewer than training.batch_size 5000"),
        (["run", "local_only", "partition={name: iid, clients: 1130}"], "min_samples|batch_size"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate", "nowhere", "--data", "digits"], "--data: expected KEY=VALUE pairs"),
        (["export", "nowhere", "out"], "nowhere is not a run's folder"),
        (["embed", "nowhere", "."], "nowhere is not an exported encoder"),
        (["run", "fedbyol", "model.weights=none.pt"], "model.weights: there is no file .*none.pt"),
        (["run", "local_only", "model.weights={resnet18: none.pt}"], "model.weights names resnet18, but architectures"),
        (["run", "local_only", "--observer", "./nothing.py"], "an observer is an existing .py file .*, got nothing.py"),
        (["report", "nowhere"], "nowhere"),
        (["run-table", "nowhere"], "nowhere"),
    ],
)
def test_a_users_mistake_is_one_line_exit_code_2_and_leaves_nothing(fedssl, tmp_path, arguments, message):
    code, _, err = fedssl(*arguments)
    one_line(code, err)
    assert re.search(message, err), err
    assert not list(tmp_path.rglob("*"))


def test_privacy_is_foretold(fedssl):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")
    assert "nothing to count: set flower.differential_privacy" in fedssl("privacy", "fedbyol")[2]
    noise = "flower.differential_privacy={name: fixed_clipping, clipping_norm: 1, noise_multiplier: 4}"
    asked = ["privacy", "fedbyol", "engine=flower", "rounds=5", noise, "flower.epsilon_budget=3"]
    code, out, _ = fedssl(*asked)
    assert code == 0
    assert "0, 1, 2, 3, 4" in out
    assert "4.98331" in out  # dp-accounting's PLDAccountant of five Gaussian events of noise multiplier 2
    assert "allows 2 rounds of a client, which is too little: a client is asked in 5 rounds" in out


# Observers

LOGGER = """
from pathlib import Path

from fedssl import Observer


class Logger(Observer):
    def round_ended(self, number, rows):
        with open(Path(__file__).with_suffix(".log"), "a") as log:
            log.write(f"{number} ")
        if number == STOP_AFTER:
            raise KeyboardInterrupt
"""


def test_observers_are_called_by_a_run_and_its_continuation(fedssl, tmp_path):
    (tmp_path / "tiny.yaml").write_text(recipe_text())
    (tmp_path / "stops.py").write_text(f"STOP_AFTER = 1\n{LOGGER}")
    (tmp_path / "goes_on.py").write_text(f"STOP_AFTER = None\n{LOGGER}")
    both = ["--observer", "./goes_on.py", "--observer", "./stops.py"]
    code, out, _ = fedssl("run", "tiny.yaml", "rounds=2", "--output", "run", *both)
    assert code == 130
    assert "continue with: fedssl run --resume run" in out
    assert fedssl("run", "--resume", "run", "--observer", "goes_on.py")[0] == 0
    assert (Path("stops.log").read_text(), Path("goes_on.log").read_text()) == ("0 1 ", "0 1 2 ")
