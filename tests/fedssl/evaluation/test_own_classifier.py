"""A supervised run's own classifier: its accuracy, and where it is measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedssl.data.options import DataOptions
from fedssl.engines.in_process import run
from fedssl.evaluation.evaluate import EvaluationOptions, evaluate_downstream, evaluate_model
from fedssl.federation import build_federation
from fedssl.reports.evaluation import evaluate_run
from tests.fedssl.conftest import AVERAGED

SUPERVISED = AVERAGED | {"objective": "supervised"}


@pytest.fixture(scope="module")
def measured(tiny):
    """A federation, its untrained model and the dataset."""
    federation = build_federation(tiny(**SUPERVISED))
    return federation, federation.new_model(None), federation.dataset


def test_the_accuracy_is_that_of_the_whole_network_on_the_test_images(measured):
    _, model, dataset = measured
    with torch.no_grad():
        model.eval()
        images = (dataset.test_images.float() / 255 - 0.5) / 0.25
        predicted = model.online["classifier"](model.encoder(images)).argmax(dim=1)
    expected = 100 * (predicted == dataset.test_labels).float().mean().item()
    metrics, _ = evaluate_model(model, dataset, EvaluationOptions(neighbors=5), 0, linear=False)
    assert metrics["classifier"] == pytest.approx(expected)
    # Labels that the network gives itself are all predicted, so the measure cannot be a constant.
    own = dataclasses.replace(dataset, test_labels=predicted)
    assert evaluate_model(model, own, EvaluationOptions(neighbors=5), 0, linear=False)[0]["classifier"] == 100.0


def test_other_data_have_other_classes_and_self_supervised_models_no_classifier(measured, tiny):
    _, model, dataset = measured
    measures = evaluate_downstream(model, {"other": dataset}, EvaluationOptions(neighbors=5), 0, after=False)
    assert "downstream_other_knn" in measures
    assert not any("classifier" in name for name in measures)
    byol = build_federation(tiny(**AVERAGED)).new_model(None)
    assert "classifier" not in evaluate_model(byol, dataset, EvaluationOptions(neighbors=5), 0, linear=False)[0]


def test_a_run_reports_it_globally_or_per_client_and_it_learns(tiny, tmp_path):
    training = {"local_epochs": 10, "batch_size": 8}
    averaged = run(tiny(**SUPERVISED, training=training), tmp_path / "averaged")
    found = {(n, who): v for n, who, metric, v in averaged.read_metrics() if metric == "classifier"}
    assert set(found) == {(0, "global"), (2, "global")}
    assert found[2, "global"] > found[0, "global"] + 20
    header = evaluate_run(tmp_path / "averaged").read_text().splitlines()[0]
    assert "classifier" in header.split(",")
    other = evaluate_run(tmp_path / "averaged", data=DataOptions(name="digits", train_limit=50, test_limit=20))
    assert "classifier" not in other.read_text()

    rows = run(tiny(objective="supervised"), tmp_path / "alone").read_metrics()
    assert {who for n, who, m, _ in rows if m == "classifier" and n == 2} == {"0", "1", "2", "mean"}
