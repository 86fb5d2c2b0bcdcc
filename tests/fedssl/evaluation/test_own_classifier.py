"""A supervised run's own classifier: its accuracy, where it is measured, and the augmentation that it trains with."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedkernels import ViewKey
from fedssl.augmentations.random_views import RandomViews
from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.engines.in_process import run
from fedssl.evaluation.evaluate import EvaluationOptions, evaluate_downstream, evaluate_model
from fedssl.evaluation.metrics import is_measure
from fedssl.federation import build_federation
from fedssl.reports.evaluation import evaluate_run
from fedssl.run_folder.directory import RunDirectory
from fedssl.tables.table import Table
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
    run(tiny(**SUPERVISED, training=training), tmp_path / "averaged")
    found = {
        (n, who): v for n, who, m, v in RunDirectory.open(tmp_path / "averaged").read_metrics() if m == "classifier"
    }
    assert set(found) == {(0, "global"), (2, "global")}
    assert found[2, "global"] > found[0, "global"] + 20
    header = evaluate_run(tmp_path / "averaged").read_text().splitlines()[0]
    assert "classifier" in header.split(",")
    other = evaluate_run(tmp_path / "averaged", data=DataOptions(name="digits", train_limit=50, test_limit=20))
    assert "classifier" not in other.read_text()

    run(tiny(objective="supervised"), tmp_path / "alone")
    rows = RunDirectory.open(tmp_path / "alone").read_metrics()
    assert {who for n, who, m, _ in rows if m == "classifier" and n == 2} == {"0", "1", "2", "mean"}


def test_no_client_may_send_the_measure_and_a_table_may_show_it():
    assert is_measure("classifier")
    table = {
        "name": "t",
        "metrics": ["classifier"],
        "seeds": [0],
        "rows": [{"label": "a", "recipe": "supervised_fedavg"}],
    }
    assert Table.model_validate(table).metrics == ["classifier"]


def test_supervised_training_is_cropped_a_little_and_mirrored_as_the_recipe_says(tiny):
    recipe = tiny(**SUPERVISED, augmentation={"flip": 0.3, "crop_scale": [0.1, 0.2], "solarize": 0.5})
    got = build_federation(recipe).method.augmentation
    assert (got.crop_scale, got.crop_ratio, got.flip) == ((0.64, 1.0), (1.0, 1.0), 0.3)
    assert (got.jitter_probability, got.grayscale, got.blur, got.solarize) == (0, 0, 0, 0)
    hard = tiny(
        **AVERAGED,
        augmentation=recipe.augmentation.model_dump(),
        objective={"name": "supervised", "mild_augmentation": False},
    )
    assert build_federation(hard).method.augmentation == recipe.augmentation
    byol = tiny(**AVERAGED, augmentation=recipe.augmentation.model_dump())
    assert build_federation(byol).method.augmentation == recipe.augmentation


def test_the_mild_views_of_a_client_differ_from_the_images_by_the_crop_alone(tiny):
    from fedssl.data.pixels import normalize

    dataset = load_dataset(DataOptions(name="digits", train_limit=30, test_limit=10), 0)
    constant = torch.full_like(dataset.train_images, 77)
    mild = build_federation(tiny(**SUPERVISED)).recipe.objective.training_augmentation(RandomViews(flip=0.0))
    views, _ = mild.views(constant, torch.arange(len(constant)), ViewKey(0))
    torch.testing.assert_close(views, normalize(constant))  # no colour changes
