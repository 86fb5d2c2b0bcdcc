"""The command line as a stranger meets it: one-line errors, exit code 2, nothing half-written."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedssl.recipe.reading import parse_recipe
from tests.fedssl.conftest import ALIGNED, tiny_values


@pytest.fixture
def tiny_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(parse_recipe(tiny_values(**ALIGNED)).to_yaml())
    return str(path)


def test_run_evaluate_report_and_resume(fedssl, tiny_file, tmp_path):
    code, out, _ = fedssl("run", tiny_file, "rounds=1")
    assert code == 0
    assert "kNN %" in out
    assert "fedssl report runs/tiny-seed0" in out
    code, out, _ = fedssl("evaluate", "runs/tiny-seed0", "--semi-supervised", "0.1")
    assert code == 0
    assert "semi_supervised_0.1" in out
    header, *rows = (tmp_path / "runs/tiny-seed0/evaluation.csv").read_text().splitlines()
    assert header == "client,knn,effective_rank,linear,semi_supervised_0.1"
    assert [row.split(",")[0] for row in rows] == ["0", "1", "2", "mean"]
    code, out, _ = fedssl("report", "runs/tiny-seed0")
    assert code == 0
    assert "data:image" in (tmp_path / "runs/tiny-seed0/report.html").read_text()
    assert fedssl("run", "--resume", "runs/tiny-seed0")[0] == 0


def test_evaluate_repeats_the_runs_own_final_figures(fedssl, tiny_file, tmp_path):
    fedssl("run", tiny_file, "rounds=1")
    fedssl("evaluate", "runs/tiny-seed0")
    metrics = (tmp_path / "runs/tiny-seed0/metrics.csv").read_text().splitlines()
    logged = {tuple(line.split(",")[1:3]): float(line.split(",")[3]) for line in metrics if line.startswith("1,")}
    lines = (tmp_path / "runs/tiny-seed0/evaluation.csv").read_text().splitlines()
    names = lines[0].split(",")
    for line in lines[1:]:
        who, *values = line.split(",")
        for name, value in zip(names[1:], values, strict=True):
            assert float(value) == pytest.approx(logged[who, name], abs=0.006)


def test_lists_and_partition(fedssl, tmp_path):
    assert "hetero_ssfl" in fedssl("recipes")[1]
    assert "digits_demo" in fedssl("tables")[1]
    assert "torch" in fedssl("doctor")[1]
    code, out, _ = fedssl("partition", "hetero_ssfl", "--chart", "chart.png")
    assert code == 0
    assert "total" in out.lower()
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


NPZ = ["local_only", "data.public_holdout=0", "data.name=npz"]
TWO = "partition={name: disjoint_classes, clients: 3}"


def images(path, **changes):
    arrays = {
        "x_train": np.zeros((40, 8, 8, 1), np.uint8),
        "y_train": np.arange(40) % 2,
        "x_test": np.zeros((10, 8, 8, 1), np.uint8),
        "y_test": np.arange(10) % 2,
    } | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name a recipe"),
        (["run", "heterossfl"], "did you mean hetero_ssfl?"),
        (["run", "hetero_ssfl", "bogus=1"], "bogus: unknown key"),
        (["run", "--resume", "nowhere"], "nowhere is not a run's folder"),
        (["run", "rounds=9", "--resume", "nowhere"], "--resume takes only the run's folder and clients_parallel=N"),
        (["run", "clients_parallel=0", "--resume", "nowhere"], "clients_parallel must be a whole number of at least 1"),
        (["run", "--resume", "nowhere", "--overwrite"], "--resume takes neither --output nor --overwrite"),
        (["run", "hetero_ssfl", "data.name=npz", "data.path=none.npz"], "none.npz"),
        (["run", *NPZ, "data.path=nokeys.npz"], "x_train"),
        (["run", *NPZ, "data.path=nan.npz"], "nan.npz"),
        (["run", *NPZ, "data.path=two.npz", TWO], "the data have only 2; lower partition.clients to 2"),
        (
            ["run", "hetero_ssfl", "data.public_holdout=0"],
            "representation_mean needs public images|cka_alignment needs",
        ),
        (["run", "local_only", "training.batch_size=5000"], "fewer than training.batch_size 5000"),
        (["run", "local_only", "partition={name: iid, clients: 1130}"], "min_samples|batch_size"),
        (["run", "local_only", "architectures=[resnet1000]"], "resnet1000"),
        (["run", "local_only", "clients_per_round=9"], "clients_per_round is 9"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate", "nowhere", "--data", "digits"], "--data: expected KEY=VALUE pairs"),
        (["export", "nowhere", "out"], "nowhere is not a run's folder"),
        (["embed", "nowhere", "."], "nowhere is not an exported encoder"),
        (["run", "fedbyol", "model.weights=none.pt"], "model.weights: there is no file .*none.pt"),
        (["run", "local_only", "model.weights={resnet18: none.pt}"], "model.weights names resnet18, but architectures"),
        (["report", "nowhere"], "nowhere"),
        (["run-table", "nowhere"], "nowhere"),
    ],
)
def test_a_users_mistake_is_one_line_exit_code_2_and_leaves_nothing(fedssl, tmp_path, arguments, message):
    np.savez(tmp_path / "nokeys.npz", pictures=np.zeros((4, 8, 8), np.uint8))
    bad = np.zeros((40, 8, 8, 1), np.float32)
    bad[3, 1, 1, 0] = np.nan
    images(tmp_path / "nan.npz", x_train=bad)
    images(tmp_path / "two.npz")
    before = sorted(tmp_path.rglob("*"))
    code, _, err = fedssl(*arguments)
    assert code == 2
    assert err.startswith("fedssl: ")
    assert err.count("\n") == 1, err
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


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
