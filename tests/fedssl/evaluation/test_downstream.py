"""Evaluation on other data than the run's, and of a supervised run's own classifier."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from fedssl.augmentations.random_views import RandomViews
from fedssl.data.options import DataOptions
from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.evaluation.evaluate import (
    EvaluationOptions,
    check_downstream,
    evaluate_downstream,
    evaluate_model,
    load_downstream,
)
from fedssl.evaluation.fine_tuning import FineTuneOptions
from fedssl.export.encoder_folder import export_encoder
from fedssl.federation import build_federation
from fedssl.models.encoders import build_encoder
from fedssl.models.model import Model
from fedssl.reports.evaluation import evaluate, parse_data, write_evaluation
from fedssl.reports.report import build_report
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.data.data_files import random_pixels, save

#: images as they are
NO_VIEWS = {"crop_scale": (1, 1), "crop_ratio": (1, 1), "flip": 0, "jitter_probability": 0, "grayscale": 0, "blur": 0}


@pytest.fixture(scope="module")
def other_data(tmp_path_factory):
    """Colour images of 12x12 pixels in two classes, one bright and one dark."""
    path = tmp_path_factory.mktemp("other") / "bright or dark.npz"
    arrays = {}
    for part, size in (("train", 40), ("test", 20), ("val", 10)):
        labels = np.arange(size) % 2
        bright = 180 * labels.astype(np.uint8)[:, None, None, None]
        arrays |= {f"x_{part}": random_pixels(size, 12, 12, 3) // 4 + bright, f"y_{part}": labels}
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def finished_run(noisy, finished, tmp_path_factory):
    """A finished run on noise of 8x8 grey pixels, and its exported encoder."""
    path = tmp_path_factory.mktemp("runs") / "run"
    evaluation = {"neighbors": 5, "linear": {"epochs": 2}, "semi_supervised_protocol": {"epochs": 2}}
    recipe = noisy(rounds=1, **AVERAGED, seed=3, evaluation=evaluation, augmentation=NO_VIEWS)
    shutil.copytree(finished(recipe), path)
    return path, export_encoder(path, path.with_name("encoder"))


def rows(path):
    with open(path, newline="") as file:
        of_clients = {row.pop("client"): row for row in csv.DictReader(file)}
    return {who: {n: v if n == "data" else float(v) for n, v in row.items()} for who, row in of_clients.items()}


def test_a_run_and_its_export_on_other_data(finished_run, other_data):
    data = DataOptions(name="npz", path=other_data)
    path, encoder = finished_run
    fine_tune = FineTuneOptions(images="validation", epochs=2, warmup_epochs=0)
    of_run = write_evaluation(path, [0.5], fine_tune=fine_tune, data=data)
    assert of_run.name == "evaluation-bright-or-dark.csv"
    measures = rows(of_run)["global"]
    assert list(measures)[:5] == ["data", "knn", "effective_rank", "linear", "semi_supervised_0.5"]
    assert "fine_tune_accuracy" in measures
    assert measures["knn"] == 100.0  # brightness alone tells the classes apart; noise would give 50
    of_export = rows(write_evaluation(encoder, [0.5], data=data))["encoder"]  # by the run's options and seed
    assert of_export.items() >= {item for item in measures.items() if not item[0].startswith("fine_tune")}
    assert not (path / "evaluation.csv").exists()
    assert of_export["view_retrieval"] == 100.0  # by the run's augmentation


def test_data_of_one_name_share_a_table_that_tells_them_apart(finished_run, other_data, tmp_path, fedssl):
    """The second call measures more; the first one's figures stay, and a repeated call replaces its own."""
    encoder = shutil.copytree(finished_run[1], tmp_path / "encoder")
    other = shutil.copytree(other_data.parent, tmp_path / "other") / other_data.name
    given = [f"name=npz,path={path}" for path in (other_data, other)]
    assert fedssl("evaluate", "encoder", "--data", given[0], "--data", given[1])[0] == 0
    (file,) = encoder.glob("evaluation*")
    with open(file, newline="") as table:
        before = list(csv.DictReader(table))
    assert [row["data"] for row in before] == [str(other_data), str(other)]
    found = evaluate(encoder, data={"name": "npz", "path": str(other)}, semi_supervised=[0.5])["encoder"]
    assert found.keys() == before[0].keys() - {"client", "data"} | {"semi_supervised_0.5"}
    with open(file, newline="") as table:
        after = list(csv.DictReader(table))
    assert after[0] == before[0] | {"semi_supervised_0.5": ""}
    assert [row["data"] for row in after] == [str(other_data), str(other)]
    file.write_text("client\n1,2\n")
    with pytest.raises(UserError, match=r"evaluation-bright-or-dark\.csv cannot be read"):
        evaluate(encoder, data={"name": "npz", "path": str(other)})


def test_an_export_takes_pixels_of_16_bits_as_its_run_did(finished_run, other_data, tmp_path):
    encoder = shutil.copytree(finished_run[1], tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    config["fedssl"]["window"] = [0, 1020]
    (encoder / "config.json").write_text(json.dumps(config))
    with np.load(other_data) as arrays:
        deep = {name: each.astype(np.uint16) * 4 if name[0] == "x" else each for name, each in arrays.items()}
    np.savez(tmp_path / "deep.npz", **deep)
    data = DataOptions(name="npz", path=tmp_path / "deep.npz")
    assert rows(write_evaluation(encoder, data=data))["encoder"]["knn"] == 100


def test_what_cannot_be_evaluated_is_refused(finished_run, tmp_path):
    path, encoder = finished_run
    with pytest.raises(UserError, match=r"is an exported encoder, which names no data: give --data"):
        write_evaluation(encoder)
    with pytest.raises(UserError, match=r"^fine_tune: .*got 'all'"):
        evaluate(path, fine_tune="all")
    with pytest.raises(UserError, match="there is no file"):
        write_evaluation(encoder, data=DataOptions(name="npz", path=tmp_path / "nothing.npz"))
    with pytest.raises(UserError, match="no validation split"):
        write_evaluation(path, fine_tune=FineTuneOptions(images="validation"), data=DataOptions(name="digits"))
    assert {p.name for p in encoder.glob("evaluation*")} <= {"evaluation-bright-or-dark.csv"}


def test_images_take_the_encoders_form(other_data):
    for shape in ((1, 8, 8), (1, 8, 24)):
        dataset = load_downstream(DataOptions(name="npz", path=other_data), shape, seed=0)
        for images in (dataset.train_images, dataset.test_images, dataset.validation_images):
            assert images.shape[1:] == shape
    sized = load_downstream(DataOptions(name="npz", path=other_data, image_size=10), (3, 8, 8), seed=0)
    assert sized.train_images.shape[1:] == (3, 10, 10)


@pytest.mark.parametrize(
    ("architecture", "size", "message"),
    [
        ("small_vit", 12, r"does not take images of 1 x 12 x 12 .*leave out image_size"),
        ("convnext_atto", 66, r"images of 1 x 66 x 66 \(it would leave out the last 2 pixels of a side\)"),
    ],
)
def test_a_size_that_the_encoder_does_not_take(architecture, size, message, other_data):
    own = 64 if size > 64 else 8
    model = Model({"encoder": build_encoder(architecture, 1, own)})
    dataset = load_downstream(DataOptions(name="npz", path=other_data, image_size=size), (1, own, own), seed=0)
    with pytest.raises(UserError, match=message):
        check_downstream(model, dataset, EvaluationOptions())


def test_the_recipes_option_is_measured_before_and_after(noisy, finished, tmp_path, other_data):
    other = {"name": "npz", "path": str(other_data)}
    evaluation = tiny_values()["evaluation"] | {"downstream": {"bright": other}, "semi_supervised": [0.5]}
    evaluation["semi_supervised_protocol"] = {"epochs": 2}
    in_process.run(noisy(rounds=1, **AVERAGED, evaluation=evaluation), tmp_path / "run")
    record, without = read_run(tmp_path / "run"), read_run(finished(noisy(rounds=1, **AVERAGED)))
    assert record.evaluated("downstream_bright_knn", "before") is not None
    assert record.evaluated("downstream_bright_knn", "after") == 100.0
    assert record.evaluated("downstream_bright_linear", "after") is not None
    assert record.evaluated("downstream_bright_semi_supervised_0.5", "before") is None
    assert record.evaluated("downstream_bright_semi_supervised_0.5", "after") is not None
    for metric in ("knn", "loss", "linear"):
        assert record.overall(metric) == without.overall(metric)
    assert rows(write_evaluation(tmp_path / "run"))["global"]["downstream_bright_knn"] == 100.0
    assert "on bright: kNN accuracy (%)" in build_report([record])


def test_encoders_of_unlabelled_images_are_fine_tuned_on_the_other_data(noisy, tmp_path, other_data):
    """As in LW-FedSSL: trained on COCO without labels, fine-tuned on CIFAR."""
    unlabelled = save(tmp_path / "unlabelled.npz", x=random_pixels(60, 8, 8))
    evaluation = tiny_values()["evaluation"] | {"fine_tune": {"epochs": 2, "warmup_epochs": 0}}
    values = AVERAGED | {"data": {"name": "npz", "path": str(unlabelled)}, "partition": {"name": "iid", "clients": 2}}
    evaluation["downstream"] = {"bright": {"name": "npz", "path": str(other_data)}}
    in_process.run(noisy(rounds=1, **values, evaluation=evaluation), tmp_path / "run")
    record = read_run(tmp_path / "run")
    assert record.evaluated("downstream_bright_fine_tune_accuracy", "after") is not None
    assert record.evaluated("fine_tune_accuracy", "after") is None
    assert record.evaluated("effective_rank", "after") is not None


def test_errors_of_the_recipes_option_name_it(noisy, tmp_path):
    other = {"a": {"name": "npz", "path": str(tmp_path / "nothing.npz")}}
    recipe = noisy(rounds=1, **AVERAGED, evaluation=tiny_values()["evaluation"] | {"downstream": other})
    with pytest.raises(UserError, match=r"evaluation\.downstream\.a: there is no file"):
        in_process.run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_on_the_command_line():
    options = parse_data("name=npz,path=a,b.npz,train_limit=5")
    assert (options.name, str(options.path), options.train_limit) == ("npz", "a,b.npz", 5)
    with pytest.raises(UserError, match="is not YAML"):
        parse_data("x=[")


# A supervised run's own classifier

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


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_accuracy_is_measured_where_all_images_of_a_split_are_of_one_class(measured, split):
    _, model, dataset = measured
    one = dataclasses.replace(dataset, **{f"{split}_labels": torch.ones_like(getattr(dataset, f"{split}_labels"))})
    options = EvaluationOptions(few_labels=[0.1], semi_supervised=[0.1], fine_tune={})
    metrics, _ = evaluate_model(model, one, options, 0, linear=True, fine_tune=True)
    assert set(metrics) == {"effective_rank", "view_retrieval", "pixel_view_retrieval", "viewed_images"}


def test_other_data_have_other_classes_and_self_supervised_models_no_classifier(measured, tiny):
    _, model, dataset = measured
    measures = evaluate_downstream(model, {"other": dataset}, EvaluationOptions(neighbors=5), 0, RandomViews(), False)
    assert "downstream_other_knn" in measures
    assert not any("classifier" in name for name in measures)
    byol = build_federation(tiny(**AVERAGED)).new_model(None)
    assert "classifier" not in evaluate_model(byol, dataset, EvaluationOptions(neighbors=5), 0, linear=False)[0]


def test_a_run_reports_it_and_it_learns(tiny, tmp_path):
    training = {"local_epochs": 5, "batch_size": 8}
    averaged = in_process.run(tiny(**SUPERVISED, training=training), tmp_path / "averaged")
    found = {(n, who): v for n, who, metric, v in averaged.read_metrics() if metric == "classifier"}
    assert set(found) == {(0, "global"), (2, "global")}
    assert found[2, "global"] > found[0, "global"] + 20
    header = write_evaluation(tmp_path / "averaged").read_text().splitlines()[0]
    assert "classifier" in header.split(",")
