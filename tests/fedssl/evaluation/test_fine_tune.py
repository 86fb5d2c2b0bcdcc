"""Fine-tuning on all labels, and the scores in which every class counts alike."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.options import DataOptions
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.evaluation.fine_tuning import (
    FineTuneOptions,
    classification_scores,
    fine_tuned_scores,
    learning_rate_factor,
)
from fedssl.reports.evaluation import evaluate_run
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.evaluation.test_semi_supervised import TinyEncoder, bright_quarters

BREASTMNIST = Path(__file__).parents[4] / "shared" / "data" / "breastmnist28_full.npz"
SCORES = ["accuracy", "per_class_accuracy", "precision", "recall", "f1"]


def quarters(validation: bool = True) -> Dataset:
    """400 training images whose labels are wrong, 200 validation images with the right ones, 200 test images."""
    (train, labels), (validated, right), (test, truth) = (
        bright_quarters(count, seed) for count, seed in ((400, 1), (200, 3), (200, 2))
    )
    extra = (validated, right) if validation else (None, None)
    return Dataset("quarters", train, (labels + 1) % 4, test, truth, tuple("abcd"), None, *extra)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return TinyEncoder()


def test_scores_by_hand():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    predicted = torch.tensor([0, 0, 0, 1, 1, 2, 1, 1])
    scores = classification_scores(predicted, labels)
    precision, recall = [3 / 3, 1 / 4, 0 / 1], [3 / 4, 1 / 2, 0.0]
    f1 = [2 * p * r / (p + r) if p + r else 0.0 for p, r in zip(precision, recall, strict=True)]
    assert scores["accuracy"] == pytest.approx(100 * 4 / 8)
    assert scores["precision"] == pytest.approx(100 * sum(precision) / 3)
    assert scores["recall"] == scores["per_class_accuracy"] == pytest.approx(100 * sum(recall) / 3)
    assert scores["f1"] == pytest.approx(100 * sum(f1) / 3)


def test_a_class_without_test_images_does_not_count():
    scores = classification_scores(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]))
    assert scores["recall"] == pytest.approx(75.0)
    assert scores["precision"] == pytest.approx(100.0)


def test_the_learning_rate_rises_for_ten_epochs_and_falls_as_a_cosine():
    options = FineTuneOptions()
    factors = [learning_rate_factor(step, 3, options.epochs, options.warmup_epochs) for step in range(120)]
    assert factors[:3] == pytest.approx([1 / 30, 2 / 30, 3 / 30])
    assert factors[29] == 1.0
    assert factors[30] == 1.0
    assert factors[75] == pytest.approx(0.5)
    assert factors[119] == pytest.approx(0.5 * (1 + np.cos(np.pi * 89 / 90)))
    assert all(a < b for a, b in pairwise(factors[:30]))
    assert all(a > b for a, b in pairwise(factors[30:]))


def test_it_learns_from_the_split_that_is_named(encoder):
    options = FineTuneOptions(epochs=12, warmup_epochs=2, batch_size=32, learning_rate=0.02, rand_augment=False)
    before = copy.deepcopy(encoder.state_dict())
    right = fine_tuned_scores(encoder, quarters(), options.model_copy(update={"images": "validation"}), 0)
    wrong = fine_tuned_scores(encoder, quarters(), options, 0)
    assert list(right) == SCORES
    assert right["accuracy"] > 85
    assert wrong["accuracy"] < 15
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())


def test_the_seed_decides_and_the_global_generator_stays(encoder):
    options = FineTuneOptions(epochs=2, warmup_epochs=1, batch_size=64)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    scores = [fine_tuned_scores(encoder, quarters(), options, seed) for seed in (0, 0, 1)]
    assert torch.equal(state, torch.get_rng_state())
    assert scores[0] == scores[1] != scores[2]


def test_augmentation_changes_the_result(encoder):
    options = FineTuneOptions(epochs=2, warmup_epochs=1, batch_size=64)
    plain = options.model_copy(update={"rand_augment": False})
    assert fine_tuned_scores(encoder, quarters(), options, 0) != fine_tuned_scores(encoder, quarters(), plain, 0)


def test_a_batch_of_one_image_is_no_error(encoder):
    data = quarters()
    options = FineTuneOptions(epochs=1, warmup_epochs=0, batch_size=399, rand_augment=False)
    assert 0 <= fine_tuned_scores(encoder, data, options, 0)["accuracy"] <= 100


def test_divergence_and_bad_options_are_told(encoder):
    with pytest.raises(UserError, match="fine-tuning diverged at 1e\\+30"):
        fine_tuned_scores(
            encoder, quarters(), FineTuneOptions(epochs=2, warmup_epochs=0, learning_rate=1e30, rand_augment=False), 0
        )
    with pytest.raises(UserError, match="the data have no validation split: use train"):
        fine_tuned_scores(encoder, quarters(validation=False), FineTuneOptions(images="validation"), 0)
    with pytest.raises(ValueError, match="warmup_epochs must be below epochs, 5"):
        FineTuneOptions(epochs=5)


def test_a_run_fine_tunes_after_training_and_so_does_evaluate(tiny, tmp_path):
    fine_tune = {"epochs": 2, "warmup_epochs": 1, "batch_size": 64}
    evaluation = {"neighbors": 5, "linear": {"epochs": 1}, "fine_tune": fine_tune}
    directory = run(tiny(**AVERAGED, rounds=1, evaluation=evaluation), tmp_path / "a")
    found = {m.removeprefix("fine_tune_"): (r, v) for r, _, m, v in directory.read_metrics() if "fine_tune" in m}
    assert list(found) == SCORES
    assert {number for number, _ in found.values()} == {1}
    header, row = evaluate_run(tmp_path / "a").read_text().splitlines()
    again = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(again["fine_tune_f1"]) == pytest.approx(found["f1"][1], abs=0.006)
    with pytest.raises(UserError, match="no validation split"):
        evaluate_run(tmp_path / "a", fine_tune=FineTuneOptions(images="validation"))


def test_a_missing_validation_split_is_refused_before_training(tiny, tmp_path):
    evaluation = {"fine_tune": {"images": "validation"}}
    with pytest.raises(UserError, match="no validation split"):
        run(tiny(**AVERAGED, evaluation=evaluation), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("medmnist", [False, True])
def test_a_validation_split_is_read_and_kept_from_the_clients(tmp_path, medmnist):
    images = np.random.default_rng(0).integers(0, 256, (24, 8, 8), dtype=np.uint8)
    labels = (np.arange(24) % 3)[:, None].astype(np.uint8)
    parts = {"train": slice(0, 12), "val": slice(12, 18), "test": slice(18, 24)}
    arrays = {}
    for name, rows in parts.items():
        x, y = (f"{name}_images", f"{name}_labels") if medmnist else (f"x_{name}", f"y_{name}")
        arrays |= {x: images[rows], y: labels[rows]}
    np.savez(tmp_path / "a.npz", **arrays)
    data = load_dataset(DataOptions(name="npz", path=tmp_path / "a.npz"), 0)
    assert data.train_images.shape == (12, 1, 8, 8)
    assert np.array_equal(data.validation_images[:, 0].numpy(), images[12:18])
    assert data.validation_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert np.array_equal(data.test_images[:, 0].numpy(), images[18:])
    resized = load_dataset(DataOptions(name="npz", path=tmp_path / "a.npz", image_size=16), 0)
    assert resized.validation_images.shape == (6, 1, 16, 16)
    x = "val_images" if medmnist else "x_val"
    np.savez(tmp_path / "b.npz", **arrays | {x: np.zeros((6, 9, 9), np.uint8)})
    with pytest.raises(UserError, match="validation images are 1x9x9"):
        load_dataset(DataOptions(name="npz", path=tmp_path / "b.npz"), 0)


@pytest.mark.skipif(not BREASTMNIST.is_file(), reason=f"needs {BREASTMNIST}")
def test_breastmnist_has_its_official_splits():
    data = load_dataset(DataOptions(name="npz", path=BREASTMNIST), 0)
    assert [len(x) for x in (data.train_images, data.validation_images, data.test_images)] == [546, 78, 156]
    assert [x.bincount().tolist() for x in (data.train_labels, data.validation_labels, data.test_labels)] == [
        [147, 399],
        [21, 57],
        [42, 114],
    ]
