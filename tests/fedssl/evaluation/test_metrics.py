"""The table of metrics: what follows from an entry."""

from __future__ import annotations

import pytest
import torch

from fedssl.evaluation.metrics import (
    EVALUATED,
    METRICS,
    MeasuredImages,
    is_accuracy,
    is_reserved,
    measured_values,
    metric_title,
    short_title,
)

FEATURES = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def test_clients_must_not_send_what_the_evaluation_or_an_engine_writes():
    reserved = {name for name in METRICS if is_reserved(name)}
    assert reserved == {name for name, entry in METRICS.items() if entry.written_by in ("evaluation", "engine")}
    assert {"knn", "bytes_up", "epsilon"} <= reserved
    assert not {"loss", "flops", "local_model_distance"} & reserved
    assert is_reserved("semi_supervised_0.3")
    assert is_reserved("downstream_mine_knn")


def test_images_without_labels_have_other_measures():
    labels = torch.arange(20) % 2
    assert list(measured_values(MeasuredImages(FEATURES, labels))) == ["effective_rank"]
    without = measured_values(MeasuredImages(FEATURES, views=[FEATURES, FEATURES + 0.1]))
    assert list(without) == ["effective_rank", "alignment", "uniformity"]
    one = FEATURES[:1]
    assert list(measured_values(MeasuredImages(one, views=[one, one]))) == ["effective_rank", "alignment"]


@pytest.mark.parametrize("name", EVALUATED)
def test_values_of_percentages_are_bounded_by_0_and_100(name):
    assert is_accuracy(name) == (METRICS[name].unit == "%") == (METRICS[name].bounds == (0.0, 100.0))


def test_titles():
    assert metric_title("memory") == "memory of a training step (bytes)"
    assert metric_title("linear@resnet18") == "linear accuracy (%), resnet18"
    assert metric_title("public_loss") == "public loss"
    assert [short_title(name) for name in ("knn", "linear_auroc", "alignment")] == [
        "kNN %",
        "linear AUROC %",
        "alignment",
    ]
