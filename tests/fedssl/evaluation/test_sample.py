"""The sample on which models are measured: whose images it holds, how many, and that all are measured without it."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fedssl.engines import in_process
from fedssl.evaluation import evaluate, linear
from fedssl.evaluation.evaluate import EvaluationOptions, measured_sample, sample_sentence
from fedssl.evaluation.fine_tuning import labeled_subset
from fedssl.recipe.reading import load_recipe
from fedssl.reports.evaluation import write_evaluation
from fedssl.reports.report import write_report
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.data.data_files import load_npz


def dataset_of(path, train=300, **left_out):
    """Each image is its own number; the classes are of unequal size."""
    arrays = {}
    for split, size in (("train", train), ("test", 100)):
        arrays[f"x_{split}"] = np.tile(np.arange(size, dtype=np.uint8), (2, 2, 1)).T
        arrays[f"y_{split}"] = np.repeat(np.arange(5), np.arange(1, 6))[np.arange(size) % 15]
    np.savez(path, **{name: array for name, array in arrays.items() if name not in left_out})
    return load_npz(path)


@pytest.mark.parametrize(("images", "expected"), [(60, (30, 30)), (260, (160, 100)), (399, (299, 100)), (7, (4, 3))])
def test_each_class_has_its_share_and_images_keep_their_labels(tmp_path, images, expected):
    dataset = dataset_of(tmp_path / "a.npz")
    sample = measured_sample(dataset, images, 5)
    assert (len(sample.train_images), len(sample.test_images)) == expected
    for split, count in zip(("train", "test"), expected, strict=True):
        labels, whole = getattr(sample, f"{split}_labels"), getattr(dataset, f"{split}_labels")
        shares = torch.bincount(whole, minlength=5) / len(whole) * count
        assert (torch.bincount(labels, minlength=5) - shares).abs().max() <= 1
    assert torch.equal(dataset.test_labels[sample.test_images[:, 0, 0, 0].long()], sample.test_labels)
    assert not torch.equal(measured_sample(dataset, images, 6).train_images, sample.train_images)
    assert torch.equal(measured_sample(dataset, images, 5).test_images, sample.test_images)
    assert measured_sample(dataset, None, 5) is measured_sample(dataset, 400, 5) is dataset


def test_a_run_says_what_it_measures_and_evaluate_measures_all(tmp_path, tiny):
    dataset = dataset_of(tmp_path / "a.npz", y_train=None, x_test=None, y_test=None)
    assert sample_sentence(dataset, 60, 0).startswith("models are measured on 60 of 300 training images (evaluation")
    recipe = tiny(rounds=1, evaluation={"images": 40, "linear": {"epochs": 1}}, **AVERAGED)
    told = []
    observer = type("Told", (in_process.Observer,), {"inform": lambda self, text: told.append(text)})()
    in_process.run(recipe, tmp_path / "run", observer)
    assert told[-1].startswith("models are measured on 20 of 120 training images and 20 of 60 test images (evaluation")
    assert read_run(tmp_path / "run").evaluated("knn", "after") % 5 == 0  # of 20 images
    on_all = recipe.model_copy(update={"evaluation": EvaluationOptions(linear={"epochs": 1})})
    in_process.run(on_all, tmp_path / "all")
    whole = read_run(tmp_path / "all").evaluated("knn", "after")
    assert f"global,{whole:.2f}," in write_evaluation(tmp_path / "run").read_text()
    assert "at most 40 images" in write_report([tmp_path / "run"], images=False).read_text()


def test_a_client_that_has_not_trained_is_not_measured_again(tmp_path, noisy, monkeypatch):
    recipe = noisy(rounds=3, clients_per_round=1, evaluation={"every": 1, "linear": {"epochs": 1}}, **ALIGNED)
    measured, evaluate = [], in_process.ClientTrainer.evaluate
    monkeypatch.setattr(in_process.ClientTrainer, "evaluate", lambda *args: measured.append(args[3]) or evaluate(*args))
    in_process.run(recipe, tmp_path / "some")
    assert [measured.count(number) for number in range(4)] == [3, 3, 1, 3]
    forgets = property(lambda self: {}, lambda self, measured: None)
    monkeypatch.setattr(in_process.LocalClients, "_measured", forgets, raising=False)
    in_process.run(recipe, tmp_path / "all")
    assert (tmp_path / "some/metrics.csv").read_bytes() == (tmp_path / "all/metrics.csv").read_bytes()


@pytest.mark.parametrize(("more", "images"), [("", 150), ("preset=digits", None), ("evaluation.images=7", 7)])
def test_presets_limit_the_evaluation_of_own_images(tmp_path, more, images):
    dataset_of(tmp_path / "a.npz", train=2000)
    data = [f"data.name=npz data.path={tmp_path / 'a.npz'} rounds=1 training.local_epochs=1", more]
    assert load_recipe("fedbyol", " ".join(data).split()).evaluation.images == images


def test_a_linear_layer_learns_from_a_part_of_the_labels(noisy, tmp_path, monkeypatch):
    """All labels give the linear accuracy itself; of few, each class has its share and each draw is another."""
    measure = Mock(wraps=linear.linear_accuracy)
    monkeypatch.setattr(evaluate, "linear_accuracy", measure)
    recipe = noisy(**AVERAGED, rounds=1, evaluation={"few_labels": [0.25, 1.0], "linear": {"epochs": 2}})
    run = read_run(in_process.run(recipe, tmp_path / "run").path)
    for number in (0, 1):
        assert run.values[number, "global", "linear_1"] == run.values[number, "global", "linear"]
        assert 0 <= run.values[number, "global", "linear_0.25"] <= 100
    seen = [call.args[:2] for call in measure.call_args_list]
    (every, labels), few, all_again = seen[-11], seen[-10:-5], seen[-5:]
    assert [len(part) for _, part in all_again] == [len(labels)] * 5
    for features, part in few:
        assert len(part) == len(labeled_subset(labels, 0.25, torch.Generator()))
        assert all(label in labels[(every == one).all(dim=1)] for one, label in zip(features, part, strict=True))
    assert len({tuple(features.flatten().tolist()) for features, _ in few}) == 5
