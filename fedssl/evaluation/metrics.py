"""What metrics are called in charts and tables, and how their values are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from .evaluate import PREFIX

METRIC_TITLES = {
    "knn": "kNN accuracy (%)",
    "linear": "linear accuracy (%)",
    "classifier": "own classifier's accuracy (%)",
    "semi_supervised_0.01": "fine-tuned on 1 % (%)",
    "semi_supervised_0.1": "fine-tuned on 10 % (%)",
    "fine_tune_accuracy": "fine-tuned accuracy (%)",
    "fine_tune_per_class_accuracy": "fine-tuned per-class accuracy (%)",
    "fine_tune_precision": "fine-tuned precision (%)",
    "fine_tune_recall": "fine-tuned recall (%)",
    "fine_tune_f1": "fine-tuned F1 (%)",
    "effective_rank": "effective rank",
    "linear_auroc": "linear AUROC (%)",
    "alignment": "alignment",
    "uniformity": "uniformity",
    "loss": "objective's loss",
    "total_loss": "loss with regularisers",
    "cka": "CKA with the target kernel",
    "memory": "memory of a training step (bytes)",
    "cuda_memory": "peak of allocated GPU memory (bytes)",
    "flops": "operations of a client's round (FLOPs)",
    "bytes_down": "sent to a client in a round (bytes)",
    "bytes_up": "sent by a client in a round (bytes)",
    "epsilon": "privacy loss epsilon, largest of any client",
}


FINE_TUNED = tuple(f"fine_tune_{score}" for score in ("accuracy", "per_class_accuracy", "precision", "recall", "f1"))


#: in percent
ACCURACIES = (
    "knn", "linear", "classifier", "linear_auroc", "semi_supervised_0.01", "semi_supervised_0.1", *FINE_TUNED
)  # fmt: skip


#: measured before and after training, and possibly in between; the fine-tuned scores after it alone
EVALUATED = (*ACCURACIES, "effective_rank", "alignment", "uniformity")


#: larger ones are neither drawn nor averaged: they would overflow
LARGEST_FIGURE = 1e150


#: between a metric and an architecture: `linear@resnet18` is the mean over the clients with this architecture
OF_ARCHITECTURE = "@"


_DECIMALS = {"alignment": 2, "uniformity": 2}


def is_evaluated(metric: str) -> bool:
    """Whether a metric is measured before or after training, on the run's data or on other data."""
    return metric.partition(OF_ARCHITECTURE)[0] in EVALUATED or metric.startswith(PREFIX)


def is_accuracy(metric: str) -> bool:
    """Whether a metric is in percent."""
    _, measure = _data_and_measure(metric)
    return measure in ACCURACIES or measure.startswith("semi_supervised_")


def _data_and_measure(metric: str) -> tuple[str, str]:
    """The label of other data, empty for the run's own, and the measure: `downstream_cifar10_knn` is on cifar10."""
    metric = metric.partition(OF_ARCHITECTURE)[0]
    if not metric.startswith(PREFIX):
        return "", metric
    label, _, measure = metric.removeprefix(PREFIX).partition("_")
    return label, measure


def metric_title(metric: str) -> str:
    """What a metric is called; one without a title keeps its name, with spaces for underscores."""
    metric, _, architecture = metric.partition(OF_ARCHITECTURE)
    if architecture:
        return f"{metric_title(metric)}, {architecture}"
    label, measure = _data_and_measure(metric)
    if label:
        return f"on {label}: {metric_title(measure)}"
    return METRIC_TITLES.get(metric, metric.replace("_", " "))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of one or more values and their sample standard deviation; None where there is only one value.

    Both are NaN where a value is not finite, or so large that its square would not be.
    """
    if not all(abs(value) < LARGEST_FIGURE for value in values):
        return math.nan, math.nan if len(values) > 1 else None
    return fmean(values), stdev(values) if len(values) > 1 else None


def format_values(metric: str, values: Sequence[float]) -> str:
    """`91.3 ± 0.4` for several seeds, `91.3` for one, a dash for none."""
    if not values:
        return "-"
    decimals = _DECIMALS.get(_data_and_measure(metric)[1], 1 if is_evaluated(metric) else 3)
    mean, spread = mean_and_spread(values)
    return f"{mean:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
