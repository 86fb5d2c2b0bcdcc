"""Fine-tuning on few labels and on all, its RandAugment, and the scores in which every class counts alike."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from fedssl.data.datasets import Dataset
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.evaluation.evaluate import EvaluationOptions, evaluate_model
from fedssl.evaluation.fine_tuning import (
    PROTOCOLS,
    FineTuneOptions,
    FineTuning,
    SemiSupervisedOptions,
    classification_scores,
    fine_tuned_network,
    fine_tuned_scores,
    labeled_subset,
    learning_rate_factor,
    semi_supervised_accuracy,
)
from fedssl.models.model import Model
from fedssl.reports.evaluation import write_evaluation
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.data.data_files import load_npz, random_pixels
from tests.fedssl.evaluation.conftest import bright_quarters, tiny_encoder

SCORES = ["accuracy", "per_class_accuracy", "precision", "recall", "f1"]


class Recorder(nn.Sequential):
    """Notes the images of each batch that it trains on, and whether its BatchNorm takes their statistics."""

    def __init__(self):
        super().__init__(*tiny_encoder())
        self.steps = []

    def forward(self, images):
        if torch.is_grad_enabled():
            self.steps.append((images.clone(), self.training))
        return super().forward(images)

    def __deepcopy__(self, memo):
        return self


def dataset_of(train, test):
    return Dataset("quarters", *train, *test, tuple("abcd"), None)


def accuracy(encoder, fraction=0.1, **options):
    dataset = dataset_of(bright_quarters(400, seed=1), bright_quarters(200, seed=2))
    return semi_supervised_accuracy(encoder, dataset, fraction, SemiSupervisedOptions(**options), 0)


def test_a_subset_takes_the_fraction_of_every_class_and_at_least_one():
    labels = torch.tensor([0] * 200 + [1] * 50 + [2] * 3 + [4])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    subset = labeled_subset(labels, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(subset, subset.unique())  # ascending, none twice
    assert labels[subset].bincount().tolist() == [20, 5, 1, 0, 1]
    assert labeled_subset(torch.tensor([1, 0, 0, 2]), 1.0, torch.Generator()).tolist() == [0, 1, 2, 3]


def test_single_values_of_a_protocol_can_be_set():
    one = SemiSupervisedOptions()
    assert (one.tuning(0.1).batch_size, one.tuning(0.011).batch_size, one.tuning(0.01).batch_size) == (512, 512, 256)
    assert SemiSupervisedOptions(batch_size=31).tuning(0.01) == one.tuning(0.01)._replace(batch_size=31)
    shorter = SemiSupervisedOptions(name="fedu2", epochs=7, augmentation="none")
    assert shorter.tuning(0.1) == PROTOCOLS["fedu2"]._replace(epochs=7, augmentation="none")
    assert SemiSupervisedOptions(name="lw_fedssl").tuning(0.1) == FineTuneOptions().tuning()


def test_a_warm_up_that_is_not_shorter_than_the_training_is_refused():
    with pytest.raises(ValueError, match="warmup_epochs must be below epochs, 8, got 10 with the protocol lw_fedssl"):
        SemiSupervisedOptions(name="lw_fedssl", epochs=8)
    with pytest.raises(ValueError, match="warmup_epochs must be below epochs, 5"):
        FineTuneOptions(epochs=5)


def test_the_learning_rate_rises_for_ten_epochs_and_falls_as_a_cosine():
    options = FineTuneOptions().tuning()
    factors = [learning_rate_factor(step, 3, options.epochs, options.warmup_epochs) for step in range(120)]
    assert factors[:3] == pytest.approx([1 / 30, 2 / 30, 3 / 30])
    assert factors[29] == factors[30] == 1.0
    assert factors[75] == pytest.approx(0.5)
    assert factors[119] == pytest.approx(0.5 * (1 + np.cos(np.pi * 89 / 90)))
    assert all(a < b for a, b in pairwise(factors[:30]))
    assert all(a > b for a, b in pairwise(factors[30:]))


@pytest.mark.parametrize(
    ("name", "rates", "nesterov"), [("hetero_ssfl", (0.05, 0.05), True), ("fedu2", (0.001, 0.3), False)]
)
def test_it_equals_plain_sgd_on_the_whole_network(name, rates, nesterov):
    # An encoder without randomness and one batch of all images, so that the loop can be written down plainly.
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
    images, labels = bright_quarters(40)
    tuning = PROTOCOLS[name]._replace(augmentation="none")
    network, got = (
        fine_tuned_network(encoder, images, labels, 4, tuning._replace(epochs=epochs), 5, torch.Generator())
        for epochs in (0, 4)
    )
    torch.testing.assert_close(network[0].state_dict(), encoder.state_dict())
    network.train()
    inputs = (images.float() / 255 - 0.5) / 0.25
    groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(network, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    torch.testing.assert_close(dict(got.named_parameters()), dict(network.named_parameters()), rtol=1e-3, atol=1e-5)


def seen_in_training(augmentation):
    """The images that reach the network in training, in one step, and the images themselves."""
    images, labels = bright_quarters(40)
    recorder, tuning = Recorder(), FineTuning(1, 40, "sgd", 0.001, augmentation=augmentation)
    fine_tuned_network(recorder, images, labels, 4, tuning, 0, torch.Generator())
    return torch.cat([seen for seen, training in recorder.steps if training]), (images.float() / 255 - 0.5) / 0.25


def rows_of(images):
    return {tuple(image.flatten().tolist()) for image in (images * 1000).round()}


def test_labelled_images_are_cropped_and_mirrored_or_left_as_they_are():
    plain, images = seen_in_training("none")
    assert rows_of(plain) == rows_of(images)
    cropped, _ = seen_in_training("crop_and_flip")
    assert cropped.shape == images.shape
    own, mirrored = rows_of(images), rows_of(images.flip(-1))
    assert rows_of(cropped) & mirrored - own
    assert rows_of(cropped) - mirrored - own  # cropped
    assert images.min() <= cropped.min() < cropped.max() <= images.max()


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1])])
def test_a_batch_of_one_image_takes_the_running_statistics(batch_size, sizes):
    """BatchNorm refuses those of one image."""
    images, labels = bright_quarters(5)
    recorder, tuning = Recorder(), FineTuning(1, batch_size, "sgd", 0.005)
    fine_tuned_network(recorder, images, labels, 4, tuning, 0, torch.Generator().manual_seed(0))
    steps = [(len(seen), training) for seen, training in recorder.steps]
    assert steps[-len(sizes) :] == [(size, size > 1) for size in sizes]


def test_the_encoder_and_the_global_generator_stay_as_they_were(encoder):
    encoder.train().requires_grad_(False)  # a target network, say
    before = copy.deepcopy(encoder.state_dict())
    random_state = torch.get_rng_state()
    frozen = accuracy(encoder, epochs=3)
    assert all(torch.equal(before[key], value) for key, value in encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in encoder.modules())
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    # and what is frozen is fine-tuned all the same, also where gradients are switched off
    with torch.no_grad():
        assert accuracy(encoder, epochs=3) == accuracy(encoder.requires_grad_(True), epochs=3) == frozen


def quarters() -> Dataset:
    """400 training images whose labels are wrong, 200 validation images with the right ones, 200 test images."""
    (train, labels), (validated, right), (test, truth) = (
        bright_quarters(count, seed) for count, seed in ((400, 1), (200, 3), (200, 2))
    )
    return Dataset("quarters", train, (labels + 1) % 4, test, truth, tuple("abcd"), None, validated, right)


def test_scores_by_hand():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    predicted = torch.tensor([0, 0, 0, 1, 1, 2, 1, 1])
    scores = classification_scores(predicted, labels)
    precision, recall, f1 = (3 / 3 + 1 / 4 + 0) / 3, (3 / 4 + 1 / 2 + 0) / 3, (6 / 7 + 1 / 3 + 0) / 3
    assert list(scores) == SCORES
    assert list(scores.values()) == pytest.approx([50, 100 * recall, 100 * precision, 100 * recall, 100 * f1])
    # a class without test images does not count
    scores = classification_scores(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 1]))
    assert (scores["recall"], scores["precision"]) == pytest.approx((75.0, 100.0))


def test_it_learns_from_the_split_that_is_named(encoder):
    options = FineTuneOptions(epochs=12, warmup_epochs=2, batch_size=32, learning_rate=0.02, augmentation="none")
    right = fine_tuned_scores(encoder, quarters(), options.model_copy(update={"images": "validation"}), 0)
    wrong = fine_tuned_scores(encoder, quarters(), options, 0)
    assert right["accuracy"] > 85
    assert wrong["accuracy"] < 15


def test_the_seed_and_the_augmentation_alone_decide(encoder):
    options = FineTuneOptions(epochs=2, warmup_epochs=1, batch_size=64)
    scores = []
    for global_seed, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(global_seed)
        scores.append(fine_tuned_scores(encoder, quarters(), options, seed))
    assert scores[0] == scores[1] != scores[2]
    plain = options.model_copy(update={"augmentation": "none"})
    assert fine_tuned_scores(encoder, quarters(), plain, 0) != scores[0]


def test_divergence_is_told(encoder):
    with pytest.raises(UserError, match="learning_rate: fine-tuning diverged at 1e\\+30"):
        accuracy(encoder, learning_rate=1e30, epochs=5)


def test_a_run_fine_tunes_after_training_and_so_does_evaluate(tiny, tmp_path):
    fine_tune = {"epochs": 2, "warmup_epochs": 1, "batch_size": 64}
    evaluation = {"neighbors": 5, "linear": {"epochs": 1}, "fine_tune": fine_tune}
    directory = run(tiny(**AVERAGED, rounds=1, evaluation=evaluation), tmp_path / "a")
    found = {m.removeprefix("fine_tune_"): (r, v) for r, _, m, v in directory.read_metrics() if "fine_tune" in m}
    assert list(found) == SCORES
    assert {number for number, _ in found.values()} == {1}
    header, row = write_evaluation(tmp_path / "a").read_text().splitlines()
    again = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(again["fine_tune_f1"]) == pytest.approx(found["f1"][1], abs=0.006)


def test_a_models_evaluation_follows_the_named_protocol(encoder):
    dataset = dataset_of(bright_quarters(200, seed=1), bright_quarters(200, seed=2))
    protocol = SemiSupervisedOptions(name="fedu2", epochs=2)
    options = EvaluationOptions(semi_supervised=[0.5], semi_supervised_protocol=protocol)
    metrics, _ = evaluate_model(Model({"encoder": encoder}), dataset, options, 3, linear=False, fine_tune=True)
    given = (encoder, dataset, 0.5)
    assert metrics["semi_supervised_0.5"] == semi_supervised_accuracy(*given, protocol, 3)
    assert metrics["semi_supervised_0.5"] != semi_supervised_accuracy(*given, SemiSupervisedOptions(epochs=2), 3)


def test_a_validation_split_is_read_and_kept_from_the_clients(tmp_path):
    images, arrays = random_pixels(18, 8, 8), {}
    for number, name in enumerate(("train", "val", "test")):
        arrays |= {f"x_{name}": images[6 * number : 6 * number + 6], f"y_{name}": np.arange(6) % 3}
    np.savez(tmp_path / "a.npz", **arrays)
    data = load_npz(tmp_path / "a.npz")
    assert np.array_equal(data.train_images[:, 0].numpy(), images[:6])
    assert np.array_equal(data.validation_images[:, 0].numpy(), images[6:12])
    assert data.validation_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert load_npz(tmp_path / "a.npz", image_size=16).validation_images.shape == (6, 1, 16, 16)
    np.savez(tmp_path / "b.npz", **arrays | {"x_val": np.zeros((6, 9, 9), np.uint8)})
    with pytest.raises(UserError, match="validation images are 1x9x9"):
        load_npz(tmp_path / "b.npz")
