"""Fine-tuning on few labels."""

import copy

import pytest
import torch
from torch import nn

from fedssl.errors import UserError
from fedssl.evaluation import semi_supervised
from fedssl.evaluation.semi_supervised import SemiSupervisedOptions, labeled_subset, semi_supervised_accuracy
from fedssl.models.encoders import build_encoder
from tests.fedssl.evaluation.bright_quarters import TinyEncoder, bright_quarters


def accuracy(encoder, seed=0, train=400, **options):
    train_images, train_labels = bright_quarters(train, seed=1)
    test_images, test_labels = bright_quarters(200, seed=2)
    return semi_supervised_accuracy(
        encoder,
        train_images,
        train_labels,
        test_images,
        test_labels,
        4,
        SemiSupervisedOptions(**options),
        seed,
    )


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
def test_fraction_out_of_range_is_an_error(fraction):
    with pytest.raises(ValueError, match="fraction"):
        SemiSupervisedOptions(fraction=fraction)


# --- semi_supervised_accuracy


def test_defaults_are_the_papers():
    expected = {"fraction": 0.1, "epochs": 100, "learning_rate": 0.05, "batch_size": None}
    assert SemiSupervisedOptions().model_dump() == expected


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
    options = SemiSupervisedOptions(fraction=fraction, epochs=1)
    # 600 labelled images
    semi_supervised_accuracy(Recorder(), images, labels, images[:2], labels[:2], 1, options, 0)
    assert max(sizes) == size
    assert sum(sizes) == 600


def test_learns_from_few_labels(encoder):
    assert accuracy(encoder, fraction=0.1) > 90  # 25 is chance


def test_one_epoch_equals_plain_sgd_on_the_whole_network(monkeypatch):
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
    options = SemiSupervisedOptions(fraction=1.0, epochs=4, learning_rate=0.05)
    got = semi_supervised_accuracy(encoder, images, labels, images, labels, 4, options, 5)
    monkeypatch.undo()
    assert len(layers) == 1

    network = nn.Sequential(copy.deepcopy(encoder), layers[0]).train()
    inputs = (images.float() / 255 - 0.5) / 0.25
    velocity = [torch.zeros_like(parameter) for parameter in network.parameters()]
    for _ in range(4):
        network.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        with torch.no_grad():  # Nesterov as torch defines it: v = 0.9 v + g, step along g + 0.9 v
            for parameter, v in zip(network.parameters(), velocity, strict=True):
                v.mul_(0.9).add_(parameter.grad)
                parameter -= 0.05 * (parameter.grad + 0.9 * v)
    expected = 100 * (network.eval()(inputs).argmax(dim=1) == labels).float().mean().item()
    assert got == pytest.approx(expected, abs=1e-4)
    assert 25 < got < 100  # neither chance nor converged


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
    options = SemiSupervisedOptions(fraction=0.01, epochs=2)
    small = build_encoder("small_resnet10", 1, 8)
    assert semi_supervised_accuracy(small, images, labels, images, labels, 2, options, 0) == 100.0


def test_divergence_is_an_error(encoder):
    with pytest.raises(UserError, match="learning_rate: fine-tuning diverged at 1e\\+30"):
        accuracy(encoder, learning_rate=1e30, epochs=5)


def test_momentum_is_the_papers():
    assert semi_supervised._MOMENTUM == 0.9
