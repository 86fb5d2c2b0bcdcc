"""Linear evaluation against a plain training loop and scikit-learn, and the area under the ROC curve."""

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from fedssl.errors import UserError
from fedssl.evaluation.linear import LinearOptions, _standardized, linear_accuracy, linear_auroc
from tests.fedssl.evaluation.conftest import blobs
from tests.fedssl.evaluation.test_metrics import normal


def test_the_named_protocol_is_what_is_trained():
    train, train_labels, test, test_labels = blobs(300, 200, 6, noise=3.0)
    given = (train, train_labels, test, test_labels, 4)
    by_name = linear_accuracy(*given, LinearOptions(name="fedu2", learning_rate=1e-3), 0)
    by_value = linear_accuracy(*given, LinearOptions(epochs=200, learning_rate=1e-3), 0)
    assert by_name == by_value != linear_accuracy(*given, LinearOptions(epochs=100, learning_rate=1e-3), 0)


def test_equals_a_plain_training_loop():
    # The same draws in the same order, given to torch's own layer: weights, biases, a permutation an epoch.
    train, train_labels, test, test_labels = blobs(300, 200, 6)
    generator = torch.Generator().manual_seed(7)
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        for parameter in (layer.weight, layer.bias):
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) / 6**0.5)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for _ in range(3):
        order = torch.randperm(300, generator=generator)
        for start in range(0, 300, 64):
            batch = order[start : start + 64]
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(train[batch]), train_labels[batch]).backward()
            optimizer.step()
    expected = 100 * (layer(test).argmax(dim=1) == test_labels).float().mean().item()
    options = LinearOptions(epochs=3, batch_size=64, learning_rate=0.01)
    got = linear_accuracy(train, train_labels, test, test_labels, 4, options, 7)
    assert got == pytest.approx(expected, abs=1e-4)
    assert 30 < got < 90  # neither chance nor converged, so that the number of steps shows


def test_standardised_features_are_those_of_scikit_learn_but_for_constant_ones():
    train, train_labels, test, test_labels = blobs(300, 200, 6)
    scaler = StandardScaler().fit(train.numpy())
    scaled = [torch.from_numpy(scaler.transform(part.numpy())).float() for part in (train, test)]
    torch.testing.assert_close(list(_standardized(train, test)), scaled)
    expected = linear_accuracy(scaled[0], train_labels, scaled[1], test_labels, 4, LinearOptions(epochs=5), 0)
    options = LinearOptions(epochs=5, standardize=True)
    assert linear_accuracy(train, train_labels, test, test_labels, 4, options, 0) == expected
    got, _ = _standardized(torch.full((5, 2), 0.1) + torch.tensor([0.0, 1e6]), torch.randn(3, 2))
    assert torch.equal(got, torch.zeros(5, 2))


def test_reproducible_from_the_seed_alone_and_nothing_given_changes():
    data = blobs(300, 1000, 6, noise=2.0)
    copies = [tensor.clone() for tensor in data]
    options = LinearOptions(epochs=1, batch_size=64)
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        results.append(linear_accuracy(*data, 4, options, 3))
        assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        assert results == [linear_accuracy(*data, 4, options, 3)] * 2
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(data, copies, strict=True))
    assert not data[0].requires_grad
    assert len({linear_accuracy(*data, 4, options, seed) for seed in range(5)}) > 1


def test_a_class_without_samples_and_a_last_batch_of_one_are_fine():
    train, train_labels, test, test_labels = blobs(65, 200, 6)
    accuracy = linear_accuracy(train, train_labels, test, test_labels, 9, LinearOptions(batch_size=64), 0)
    assert accuracy > 50


def test_divergence_is_an_error():
    with pytest.raises(UserError, match=r"the linear evaluation diverged at 0\.003"):
        linear_accuracy(torch.full((300, 6), torch.nan), *blobs(300, 200, 6)[1:], 4, LinearOptions(epochs=1), 0)


# The mean area under the ROC curve over several labels an image

QUICK = LinearOptions(epochs=40, batch_size=50, learning_rate=0.05)


def test_auroc_of_labels_that_the_features_hold():
    train, test = normal(400, 6), normal(200, 6, seed=1)

    def held(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values[:, 0] > 0, values[:, 1] - values[:, 2] > 1.5], dim=1).to(torch.uint8)

    first = linear_auroc(train, held(train), test, held(test), QUICK, 0)
    assert first > 98
    other = linear_auroc(train, held(train), test, held(test), QUICK, 1)
    assert first == linear_auroc(train, held(train), test, held(test), QUICK, 0) != other
    shuffled = held(test)[torch.randperm(200, generator=torch.Generator().manual_seed(2))]
    assert 35 < linear_auroc(train, held(train), test, shuffled, QUICK, 0) < 65
    # One label in the wrong order and one in the right order have the mean of chance.
    half = held(test)
    half[:, 0] = 1 - half[:, 0]
    assert 45 < linear_auroc(train, held(train), test, half, QUICK, 0) < 55


def test_labels_without_both_values_have_no_auroc():
    train, test = normal(60, 6), normal(40, 6, seed=1)
    targets, truth = (torch.stack([x[:, 0] > 0, x[:, 0] > 99], dim=1).to(torch.uint8) for x in (train, test))
    assert linear_auroc(train, targets, test, truth, QUICK, 0) > 95
    assert linear_auroc(train, targets[:, 1:], test, truth[:, 1:], QUICK, 0) is None
