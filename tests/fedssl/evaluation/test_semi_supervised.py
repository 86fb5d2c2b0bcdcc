"""Fine-tuning on few labels."""

import copy

import pytest
import torch
from torch import nn

from fedssl.data.datasets import Dataset
from fedssl.errors import UserError
from fedssl.evaluation.evaluate import EvaluationOptions, evaluate_model
from fedssl.evaluation.fine_tuning import (
    PROTOCOLS,
    FineTuneOptions,
    FineTuning,
    SemiSupervisedOptions,
    fine_tuned_network,
    labeled_subset,
    semi_supervised_accuracy,
)
from fedssl.models.encoders import build_encoder
from fedssl.models.model import Model
from tests.fedssl.evaluation.bright_quarters import TinyEncoder, bright_quarters


def accuracy(encoder, seed=0, train=400, fraction=0.1, **options):
    train_images, train_labels = bright_quarters(train, seed=1)
    test_images, test_labels = bright_quarters(200, seed=2)
    dataset = Dataset("quarters", train_images, train_labels, test_images, test_labels, tuple("abcd"), None)
    return semi_supervised_accuracy(encoder, dataset, fraction, SemiSupervisedOptions(**options), seed)


# --- labeled_subset


def test_subset_takes_the_fraction_of_every_class_and_at_least_one():
    labels = torch.tensor([0] * 200 + [1] * 50 + [2] * 3 + [4])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    subset = labeled_subset(labels, 0.1, torch.Generator().manual_seed(0))
    assert torch.equal(subset, subset.unique())  # ascending, none twice
    assert labels[subset].bincount().tolist() == [20, 5, 1, 0, 1]


def test_subset_is_random_but_reproducible():
    labels = torch.arange(1000) % 10
    first, again, other = (labeled_subset(labels, 0.1, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_subset_of_everything():
    labels = torch.tensor([1, 0, 0, 2])
    assert labeled_subset(labels, 1.0, torch.Generator()).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_fraction_out_of_range_is_an_error(encoder, fraction):
    with pytest.raises(UserError, match="fraction: expected above 0 and at most 1"):
        accuracy(encoder, fraction=fraction)


# --- semi_supervised_accuracy


def test_the_default_protocol_is_hetero_ssfls():
    expected = FineTuning(epochs=100, batch_size=512, optimizer="nesterov", learning_rate=0.05)
    assert SemiSupervisedOptions().tuning(0.1) == expected


def test_a_name_gives_all_values_and_single_ones_can_be_set():
    fedu2 = SemiSupervisedOptions(name="fedu2")
    assert fedu2.tuning(0.01) == fedu2.tuning(0.1)
    assert fedu2.tuning(0.1) == FineTuning(
        epochs=200,
        batch_size=128,
        optimizer="sgd",
        learning_rate=0.001,
        classifier_learning_rate=0.3,
        augmentation="crop_and_flip",
    )
    shorter = SemiSupervisedOptions(name="fedu2", epochs=7, augmentation="none")
    assert shorter.tuning(0.1) == fedu2.tuning(0.1)._replace(epochs=7, augmentation="none")
    assert SemiSupervisedOptions(batch_size=31).tuning(0.01).batch_size == 31
    # LW-FedSSL's is the same as fine-tuning on all labels by its protocol
    assert SemiSupervisedOptions(name="lw_fedssl").tuning(0.1) == FineTuneOptions().tuning()


def test_a_warm_up_that_is_not_shorter_than_the_training_is_refused():
    with pytest.raises(ValueError, match="warmup_epochs must be below epochs, 8, got 10 with the protocol lw_fedssl"):
        SemiSupervisedOptions(name="lw_fedssl", epochs=8)
    assert SemiSupervisedOptions(name="lw_fedssl", epochs=8, warmup_epochs=2).tuning(0.1).warmup_epochs == 2


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_learns_from_few_labels(encoder, name):
    warmup = {"warmup_epochs": 1} if name == "lw_fedssl" else {}
    assert accuracy(encoder, fraction=0.5, name=name, epochs=40, batch_size=16, augmentation="none", **warmup) > 60


def seen_in_training(augmentation):
    """The images that reach the network in training, with the protocol's batch; the encoder keeps them all."""
    seen = []

    class Recorder(TinyEncoder):
        def forward(self, images):
            if self.training:
                seen.append(images.clone())
            return super().forward(images)

    torch.manual_seed(0)
    images, labels = bright_quarters(40)
    options = SemiSupervisedOptions(epochs=1, augmentation=augmentation, name="fedu2", batch_size=40)
    dataset = Dataset("quarters", images, labels, images, labels, tuple("abcd"), None)
    semi_supervised_accuracy(Recorder(), dataset, 1.0, options, 0)
    return torch.cat(seen), (images.float() / 255 - 0.5) / 0.25


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


@pytest.mark.parametrize(("fraction", "size"), [(0.01, 256), (0.1, 512)])
def test_default_batch_sizes_are_the_papers(fraction, size):
    sizes = []

    class Recorder(TinyEncoder):
        def forward(self, images):
            if self.training:
                sizes.append(len(images))
            return super().forward(images)

    labels = torch.zeros(round(600 / fraction), dtype=torch.int64)
    images = torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8)
    options = SemiSupervisedOptions(epochs=1)
    # 600 labelled images
    dataset = Dataset("one class", images, labels, images[:2], labels[:2], ("a",), None)
    semi_supervised_accuracy(Recorder(), dataset, fraction, options, 0)
    assert max(sizes) == size
    assert sum(sizes) == 600


def test_learns_from_few_labels(encoder):
    assert accuracy(encoder, fraction=0.1) > 90  # 25 is chance


@pytest.mark.parametrize(
    ("name", "rates", "nesterov"), [("hetero_ssfl", (0.05, 0.05), True), ("fedu2", (0.001, 0.3), False)]
)
def test_it_equals_plain_sgd_on_the_whole_network(monkeypatch, name, rates, nesterov):
    # An encoder without randomness and one batch of all images, so that the loop can be written down plainly.
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
    images, labels = bright_quarters(40)
    layers = []
    original = nn.Linear.__init__

    def remember(layer, *arguments, **keywords):
        original(layer, *arguments, **keywords)
        layers.append(copy.deepcopy(layer))

    monkeypatch.setattr(nn.Linear, "__init__", remember)
    tuning = PROTOCOLS[name]._replace(epochs=4, augmentation="none")
    generator = torch.Generator().manual_seed(5)
    got = fine_tuned_network(encoder, images, labels, 4, tuning, 5, generator)
    monkeypatch.undo()
    assert len(layers) == 1

    network = nn.Sequential(copy.deepcopy(encoder), layers[0]).train()
    inputs = (images.float() / 255 - 0.5) / 0.25
    velocity = [torch.zeros_like(parameter) for parameter in network.parameters()]
    rate_of = [rates[0]] * 4 + [rates[1]] * 2
    for _ in range(4):
        network.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        with torch.no_grad():  # as torch defines it: v = 0.9 v + g, a step along v, with Nesterov along g + 0.9 v
            for parameter, v, rate in zip(network.parameters(), velocity, rate_of, strict=True):
                v.mul_(0.9).add_(parameter.grad)
                parameter -= rate * (parameter.grad + 0.9 * v if nesterov else v)
    for own, expected in zip(got.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-5)


def test_the_encoder_and_the_global_generator_stay_as_they_were(encoder):
    encoder.train()
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)  # a target network, say
    before = copy.deepcopy(encoder.state_dict())
    random_state = torch.get_rng_state()
    accuracy(encoder, epochs=2)
    assert all(torch.equal(before[key], value) for key, value in encoder.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in encoder.modules())
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_a_frozen_encoder_is_fine_tuned_all_the_same(encoder):
    expected = accuracy(encoder, epochs=3)
    assert accuracy(encoder.requires_grad_(False), epochs=3) == expected
    with torch.no_grad():
        assert accuracy(encoder, epochs=3) == expected


def test_reproducible_from_the_seed_alone(encoder):
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        results.append(accuracy(encoder, seed=3, epochs=2))
    assert results[0] == results[1]
    assert len({accuracy(encoder, seed=seed, epochs=2) for seed in range(5)}) > 1


@pytest.mark.parametrize("batch_size", [1, 8, 39])  # 40 labelled images: batches of one, none, the last one
def test_a_batch_of_one_image_does_not_crash(encoder, batch_size):
    assert accuracy(encoder, batch_size=batch_size, learning_rate=0.005, epochs=5) > 25


def test_one_labelled_image_of_a_resnet_does_not_crash():
    images, labels = torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64)
    options = SemiSupervisedOptions(epochs=2)
    small = build_encoder("small_resnet10", 1, 8)
    dataset = Dataset("one class", images, labels, images, labels, tuple("ab"), None)
    assert semi_supervised_accuracy(small, dataset, 0.01, options, 0) == 100.0


def test_divergence_is_an_error(encoder):
    with pytest.raises(UserError, match="learning_rate: fine-tuning diverged at 1e\\+30"):
        accuracy(encoder, learning_rate=1e30, epochs=5)


def test_a_models_evaluation_follows_the_named_protocol(encoder):
    (train, labels), (test, truth) = bright_quarters(200, seed=1), bright_quarters(200, seed=2)
    dataset = Dataset("quarters", train, labels, test, truth, tuple("abcd"), None)
    protocol = SemiSupervisedOptions(name="fedu2", epochs=2)
    options = EvaluationOptions(semi_supervised=[0.5], semi_supervised_protocol=protocol)
    metrics, _ = evaluate_model(Model({"encoder": encoder}), dataset, options, 3, linear=False, fine_tune=True)
    given = (encoder, dataset, 0.5)
    assert metrics["semi_supervised_0.5"] == semi_supervised_accuracy(*given, protocol, 3)
    assert metrics["semi_supervised_0.5"] != semi_supervised_accuracy(*given, SemiSupervisedOptions(epochs=2), 3)
