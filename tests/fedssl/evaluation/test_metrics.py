"""kNN against scikit-learn, other measures and projections by hand, and the table of metrics."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch._subclasses.fake_tensor import FakeTensorMode

from fedssl.errors import UserError
from fedssl.evaluation import metrics
from fedssl.evaluation.metrics import (
    EVALUATED,
    METRICS,
    MeasuredImages,
    effective_rank,
    is_accuracy,
    is_reserved,
    knn_accuracy,
    measured_values,
    singular_values,
    uniformity,
)
from tests.fedssl.evaluation.conftest import blobs


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide_blobs(train=90, test=60, seed=0):
    return blobs(train, test, 5, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize(("neighbors", "temperature", "seed"), [(1, 0.1, 0), (20, 1.0, 0), (90, 0.02, 1)])
def test_knn_equals_that_of_scikit_learn(neighbors, temperature, seed):
    """Wu et al. 2018: a neighbour's vote is exp(cosine / temperature)."""
    train, train_labels, test, test_labels = data = wide_blobs(seed=seed)

    def votes(distances):
        return np.exp((1 - distances) / temperature)

    classifier = KNeighborsClassifier(neighbors, metric="cosine", weights=votes).fit(train, train_labels)
    expected = 100 * classifier.score(test, test_labels)
    assert 30 < expected < 100  # otherwise the case distinguishes nothing
    assert knn_accuracy(*data, neighbors=neighbors, temperature=temperature) == pytest.approx(expected)


def test_knn_does_not_depend_on_chunks_scales_or_a_tiny_temperature(monkeypatch):
    train, train_labels, test, test_labels = data = wide_blobs()
    expected = knn_accuracy(*data)
    assert knn_accuracy(1e3 * train, train_labels, 1e-3 * test, test_labels) == expected
    assert knn_accuracy(*data, temperature=1e-6) == knn_accuracy(*data, neighbors=1)
    for size in (1, 7 * 90, 90 * 60):  # one test sample a time, seven, all
        monkeypatch.setattr(metrics, "_SIMILARITIES_AT_A_TIME", size)
        assert knn_accuracy(*data) == expected
    few = wide_blobs(train=8)
    assert knn_accuracy(*few, neighbors=20) == knn_accuracy(*few, neighbors=8)


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


def test_uniformity_by_hand():
    # squared distances 2, 4 and 2
    points = torch.tensor([[1.0, 0], [0, 5], [-2, 0]])
    assert uniformity(points) == pytest.approx(math.log((2 * math.exp(-4) + math.exp(-8)) / 3))
    assert uniformity(torch.ones(9, 4)) == pytest.approx(0.0, abs=1e-12)
    # in d dimensions the cosine of two uniform points has mean 0 and variance 1 / d: log E exp(4 cos - 4) is -4 + 8 / d
    assert uniformity(normal(1000, 400)) == pytest.approx(-4 + 8 / 400, abs=0.01)


# Singular values and the effective rank


def features_with_spectrum(values):
    """Of mean 0, with singular values in this proportion."""
    half = torch.diag(torch.tensor(values, dtype=torch.float64))
    return torch.cat([half, -half])


@pytest.mark.parametrize("shape", [(50, 6), (6, 50)])
def test_their_squares_are_the_eigenvalues_of_the_covariance(shape):
    features = normal(*shape)
    covariance = np.atleast_2d(np.cov(features.double().numpy(), rowvar=False, bias=True))
    eigenvalues = np.sort(np.linalg.eigvalsh(covariance))[::-1][: min(shape)]
    got = singular_values(features)
    assert got.shape == (min(shape),)
    np.testing.assert_allclose(got.square().numpy(), eigenvalues, atol=1e-12)


def test_effective_rank_by_hand():
    for rank in (1, 2, 5, 7):
        assert effective_rank(features_with_spectrum([2.0] * rank)) == pytest.approx(rank)
    # p = (1/2, 1/4, 1/4): the entropy is (1/2 + 1/2) log 2 + 1/2 log 2 = 3/2 log 2.
    assert effective_rank(features_with_spectrum([2.0, 1.0, 1.0])) == pytest.approx(2**1.5)
    expected = math.exp(-sum(share * math.log(share) for share in (0.7, 0.2, 0.1)))
    features = features_with_spectrum([70.0, 20.0, 10.0])
    assert effective_rank(features) == pytest.approx(expected)
    # whatever the scale and the shift
    assert effective_rank(1e-6 * features + 3.0) == pytest.approx(expected, rel=1e-6)


def test_collapsed_representations_have_effective_rank_one():
    constant = torch.rand(1, 5).expand(30, 5).half()
    # A collapsed encoder as it comes out of float32 arithmetic: the last bit differs from row to row.
    rounding_noise = torch.full((64, 32), 0.3) * (1 + 1e-7 * normal(64, 32))
    for features in (torch.zeros(10, 3), torch.rand(1, 5), constant, rounding_noise):
        assert effective_rank(features) == 1.0


def test_small_variation_around_a_large_mean_is_no_collapse():
    assert effective_rank(1e-3 * normal(2000, 8) + 1.0) == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_spectrum_of_what_is_not_finite_is_refused(value):
    with pytest.raises(UserError, match="features: contains NaN or infinite"):
        effective_rank(torch.tensor([[1.0, value]]))


def test_clients_must_not_send_what_anything_but_training_writes():
    reserved = {name for name in METRICS if is_reserved(name)}
    assert reserved == {name for name, entry in METRICS.items() if entry.written_by != "training"}
    assert {"knn", "bytes_up", "epsilon", "local_model_distance"} <= reserved
    assert not {"loss", "flops"} & reserved
    assert all(map(is_reserved, ("semi_supervised_0.3", "downstream_mine_knn", "classifier")))
    assert all(map(is_reserved, ("knn@resnet18", "linear@worst", "loss@worst")))  # tables make these
    assert all(map(is_reserved, ("KNN", "knn ", "knn\x7f", "kNN accuracy", "effective rank", "bytes-up")))
    assert not any(map(is_reserved, ("public_effective_rank", "uniformity_gap", "total_loss")))


def test_images_without_labels_have_other_measures():
    features, labels = normal(20, 4), torch.arange(20) % 2
    assert list(measured_values(MeasuredImages(features, labels))) == ["effective_rank"]
    without = measured_values(MeasuredImages(features, views=[features, features + 0.1]))
    assert list(without) == ["effective_rank", "alignment", "uniformity", "view_retrieval", "viewed_images"]
    assert without["viewed_images"] == 20
    one = features[:1]
    of_one = measured_values(MeasuredImages(one, views=[one, one]))
    assert list(of_one) == ["effective_rank", "alignment", "viewed_images"]


def test_accuracies_are_in_percent():
    for name in EVALUATED:
        assert (METRICS[name].unit == "%") == is_accuracy(name) == is_accuracy(f"downstream_a_{name}"), name
