"""Nearest-neighbour accuracy against a loop written from the formula and against scikit-learn."""

import math

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch._subclasses.fake_tensor import FakeTensorMode

from fedssl.errors import UserError
from fedssl.evaluation import metrics
from fedssl.evaluation.metrics import knn_accuracy


def blobs(train=90, test=60, dimension=5, classes=4, noise=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dimension, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (train + test,), generator=generator)
    points = centres[labels] + noise * torch.randn(train + test, dimension, generator=generator, dtype=torch.float64)
    return points[:train], labels[:train], points[train:], labels[train:]


def loop_accuracy(train, train_labels, test, test_labels, neighbors, temperature):
    """Wu et al. 2018, one sample and one neighbour at a time."""

    def cosine(x, y):
        return sum(a * b for a, b in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)

    correct = 0
    for point, label in zip(test.tolist(), test_labels.tolist(), strict=True):
        ranked = sorted(
            ((cosine(point, key), other) for key, other in zip(train.tolist(), train_labels.tolist(), strict=True)),
            reverse=True,
        )
        votes = {}
        for similarity, other in ranked[:neighbors]:
            votes[other] = votes.get(other, 0.0) + math.exp(similarity / temperature)
        correct += max(votes, key=votes.get) == label
    return 100 * correct / len(test)


@pytest.mark.parametrize(("neighbors", "temperature"), [(1, 0.1), (5, 0.1), (20, 0.1), (20, 1.0), (90, 0.02)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_the_loop(neighbors, temperature, seed):
    data = blobs(seed=seed)
    expected = loop_accuracy(*data, neighbors, temperature)
    assert 30 < expected < 100  # otherwise the case distinguishes nothing
    assert knn_accuracy(*data, neighbors=neighbors, temperature=temperature) == pytest.approx(expected)


def test_temperature_weights_the_votes():
    # The nearest is of class 1; two farther ones, at cosine 0.6, are of class 0. 2 exp(0.6 / t) > exp(1 / t)
    # where t > 0.4 / log 2 = 0.577.
    train = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
    labels = torch.tensor([1, 0, 0])
    query, truth = torch.tensor([[3.0, 0.0]]), torch.tensor([1])
    assert knn_accuracy(train, labels, query, truth, neighbors=3, temperature=0.57) == 100.0
    assert knn_accuracy(train, labels, query, truth, neighbors=3, temperature=0.59) == 0.0


def test_agrees_with_scikit_learn():
    train, train_labels, test, test_labels = blobs(noise=0.7)
    classifier = KNeighborsClassifier(
        n_neighbors=11,
        metric="cosine",
        weights=lambda distance: torch.exp(torch.tensor(-distance / 0.1)).numpy(),
    ).fit(train.numpy(), train_labels.numpy())
    expected = 100 * classifier.score(test.numpy(), test_labels.numpy())
    assert knn_accuracy(train, train_labels, test, test_labels, neighbors=11) == pytest.approx(expected)


def test_a_high_temperature_is_the_unweighted_vote():
    train, train_labels, test, test_labels = blobs(noise=0.7)
    labels = (train_labels % 2, test_labels % 2)  # two classes and an odd number of voters: no ties
    classifier = KNeighborsClassifier(n_neighbors=11, metric="cosine").fit(train.numpy(), labels[0].numpy())
    expected = 100 * classifier.score(test.numpy(), labels[1].numpy())
    assert knn_accuracy(train, labels[0], test, labels[1], neighbors=11, temperature=1e6) == pytest.approx(expected)


def test_chunks_do_not_matter(monkeypatch):
    data = blobs()
    expected = knn_accuracy(*data)
    for size in (1, 7 * 90, 90 * 60):  # one test sample a time, seven, all
        monkeypatch.setattr(metrics, "_SIMILARITIES_AT_A_TIME", size)
        assert knn_accuracy(*data) == expected


def test_on_a_gpu_the_number_of_classes_and_the_accuracy_alone_are_read(monkeypatch):
    """Each reading waits for the device. Fake tensors know their device and refuse what mixes two of them."""
    read = []
    monkeypatch.setattr(torch.Tensor, "__int__", lambda value: read.append(value.device.type) or 3)
    monkeypatch.setattr(metrics, "require_finite", lambda *_: None)
    monkeypatch.setattr(metrics, "_SIMILARITIES_AT_A_TIME", 90)  # one test sample at a time
    with FakeTensorMode():
        train, test = torch.empty(90, 5, device="cuda"), torch.empty(60, 5, device="cuda")
        train_labels, test_labels = (torch.zeros(len(one), dtype=torch.int64) for one in (train, test))
        assert knn_accuracy(train, train_labels, test, test_labels) == 100 * 3 / 60
    assert read == ["cuda", "cuda"]


def test_fewer_training_samples_than_neighbors_uses_all():
    data = blobs(train=8)
    assert knn_accuracy(*data, neighbors=20) == knn_accuracy(*data, neighbors=8)


def test_scale_of_the_representations_does_not_matter():
    train, train_labels, test, test_labels = blobs()
    expected = knn_accuracy(train, train_labels, test, test_labels)
    assert knn_accuracy(1e3 * train, train_labels, 1e-3 * test, test_labels) == expected


def test_tiny_temperature_does_not_overflow():
    data = blobs()
    assert knn_accuracy(*data, temperature=1e-6) == knn_accuracy(*data, neighbors=1)


def test_half_precision_is_computed_wider():
    train, train_labels, test, test_labels = (tensor[:50] for tensor in blobs())
    halves = (train.half(), train_labels, test.half(), test_labels)
    assert knn_accuracy(*halves) == knn_accuracy(halves[0].double(), train_labels, halves[2].double(), test_labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.full((90, 5), torch.nan)}, "train_features: contains NaN"),
        ({2: torch.full((60, 5), torch.inf)}, "test_features: contains NaN"),
        ({1: torch.full((90,), 0.4)}, r"train_labels: expected integers .* got torch\.float32"),
    ],
)
def test_bad_input_is_named(change, message):
    data = [change.get(position, tensor) for position, tensor in enumerate(blobs())]
    with pytest.raises(UserError, match=message):
        knn_accuracy(*data)


@pytest.mark.parametrize("options", [{"neighbors": 0}, {"temperature": 0.0}, {"temperature": math.nan}])
def test_bad_options_are_named(options):
    with pytest.raises(UserError, match=f"{next(iter(options))}: expected"):
        knn_accuracy(*blobs(), **options)
