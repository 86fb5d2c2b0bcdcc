"""What metrics are called in charts and tables, and how their values are written."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

METRIC_TITLES = {
    "knn": "kNN accuracy (%)",
    "linear": "linear accuracy (%)",
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
}
FINE_TUNED = tuple(f"fine_tune_{score}" for score in ("accuracy", "per_class_accuracy", "precision", "recall", "f1"))
#: in percent
ACCURACIES = ("knn", "linear", "linear_auroc", "semi_supervised_0.01", "semi_supervised_0.1", *FINE_TUNED)
#: measured before and after training, and possibly in between; the fine-tuned scores after it alone
EVALUATED = (*ACCURACIES, "effective_rank", "alignment", "uniformity")
_DECIMALS = dict.fromkeys((*ACCURACIES, "effective_rank"), 1) | {"alignment": 2, "uniformity": 2}


def metric_title(metric: str) -> str:
    """What a metric is called; one without a title keeps its name, with spaces for underscores."""
    return METRIC_TITLES.get(metric, metric.replace("_", " "))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of one or more values and their sample standard deviation; None where there is only one value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def format_values(metric: str, values: Sequence[float]) -> str:
    """`91.3 ± 0.4` for several seeds, `91.3` for one, a dash for none."""
    if not values:
        return "-"
    decimals = _DECIMALS.get(metric, 3)
    mean, spread = mean_and_spread(values)
    return f"{mean:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
