"""The metrics of a run: the functions that measure representations, the table of all metrics, and how they are shown.

Tables, reports, the command line, model cards, the guard and the sites read `METRICS`. A metric of representations is
its function and its entry, both in this file.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .features import require_finite

#: begins the names of metrics on other data: downstream_LABEL_METRIC
DOWNSTREAM = "downstream_"

#: between a metric and an architecture: `linear@resnet18` is the mean over the clients with this architecture
OF_ARCHITECTURE = "@"
#: in place of an architecture: `linear@worst` is the lowest value of any client, or the global model's
WORST_CLIENT = "worst"

#: values as large as this are neither drawn nor averaged: they would overflow
LARGEST_FIGURE = 1e150

_SIMILARITIES_AT_A_TIME = 16 * 2**20  # of kNN: 64 MiB in float32, whatever the size of the test set


class MeasuredImages(NamedTuple):
    """The images that a model is measured on, as its encoder represents them.

    Attributes:
        features: their representations, float32 [m, d].
        labels: their classes, int64 [m]; None without labels.
        views: the representations of two views of each of the first images, float32 [v, d] each; may be empty.
        view_pixels: the pixels of these views, float32 [v, p] each.
    """

    features: Tensor
    labels: Tensor | None = None
    views: Sequence[Tensor] = ()
    view_pixels: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Metric:
    """A metric that a run may write, and how it is shown.

    Attributes:
        title: its name in charts and tables, without the unit.
        unit: `%`, `bytes` or `FLOPs`; empty for a number without a unit.
        decimals: digits after the point in tables.
        written_by: a model's evaluation, a client's training, an aggregator, or the engine. Clients must not send
            other metrics than those of their training.
        measure: returns the value, or None where it is not defined; None where `evaluate_model` has code of its own for
            the metric, as for all that have options or train a network.
        images: the images that the metric is measured on: with a class each, without, or both.
        on_other_data: whether it is also measured on other data, as `downstream_LABEL_NAME`.
        in_tables: whether a table of runs may have it as a column.
        in_bars: whether reports draw bars of what tables may have; those of every fine-tuned score would be too many.
        printed: whether `fedssl run` prints it after the last round.
    """

    name: str
    title: str
    unit: str = ""
    decimals: int = 1
    written_by: Literal["evaluation", "training", "aggregator", "engine"] = "evaluation"
    measure: Callable[[MeasuredImages], float | None] | None = None
    images: Literal["labelled", "unlabelled", "all"] = "labelled"
    on_other_data: bool = True
    in_tables: bool = True
    in_bars: bool = True
    printed: bool = False


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    neighbors: int = 20,
    temperature: float = 0.1,
) -> float:
    """Return the accuracy, in percent, of the weighted nearest-neighbour classifier of Wu et al. 2018 (section 3.4).

    Each of the `neighbors` training samples of highest cosine similarity s to a test sample votes for its class with
    weight exp(s / temperature). The class with the highest sum wins, and of equal ones that with the lowest index. With
    fewer training samples than `neighbors`, all of them vote. A zero vector has similarity 0 to everything.

    Wu et al. use 200 neighbours and temperature 0.07 on ImageNet; the defaults here suit small training sets.

    Args:
        train_features, test_features: float32 or float64 [n, d] and [m, d], finite.
        train_labels, test_labels: integer [n] and [m], at least 0.
    """
    device = train_features.device
    keys = F.normalize(train_features, dim=1)
    queries = F.normalize(test_features.to(device), dim=1)
    key_labels = train_labels.to(device, torch.int64)
    classes = int(key_labels.max()) + 1
    voters = min(neighbors, len(keys))
    chunk = max(1, _SIMILARITIES_AT_A_TIME // len(keys))

    correct = torch.zeros((), dtype=torch.int64, device=device)  # read once, as each look waits for a GPU
    for query, label in zip(queries.split(chunk), test_labels.to(device).split(chunk), strict=True):
        similarity, index = (query @ keys.T).topk(voters, dim=1)
        # The first is the highest; relative to it the weights cannot overflow, and the winner is the same.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = torch.zeros(len(query), classes, dtype=keys.dtype, device=device)
        votes.scatter_add_(1, key_labels[index], weight)
        correct += (votes.argmax(dim=1) == label).sum()
    return 100.0 * int(correct) / len(queries)


def singular_values(features: Tensor) -> Tensor:
    """Return the singular values of the column-centred representation matrix [n, d] divided by sqrt(n).

    They are the standard deviations of the representation along its principal axes, so they do not grow with the number
    of samples: their squares are the eigenvalues of the covariance matrix (with divisor n). They are float64
    [min(n, d)], descending, on the device of `features`. A feature that is not finite raises a UserError.
    """
    require_finite("features", features)
    matrix = features.detach().to(torch.float64)
    return torch.linalg.svdvals((matrix - matrix.mean(dim=0)) / len(matrix) ** 0.5)


def effective_rank(features: Tensor) -> float:
    """Return the effective rank of Roy & Vetterli 2007: exp of the entropy of the normalised singular values.

    effective rank = exp(-sum_i p_i log p_i) with p_i = s_i / sum_j s_j, s = `singular_values(features)`. It lies
    between 1 (all variation along one axis) and min(n - 1, d) (all axes vary alike), and does not change when the
    representation is scaled, shifted or rotated.

    Roy & Vetterli leave it undefined where nothing varies. Here it is then 1.0, the lowest value, as the representation
    has fully collapsed. That includes one sample, and representations that differ by no more than the rounding of their
    dtype, whose directions would be noise.
    """
    values = singular_values(features)
    root_mean_square_norm = features.detach().to(torch.float64).norm() / len(features) ** 0.5
    rounding = 16 * torch.finfo(features.dtype).eps * root_mean_square_norm
    if values.norm() <= rounding:  # the norm of the spectrum is the root mean square distance from the mean
        return 1.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def alignment(first: Tensor, second: Tensor) -> float:
    """Return the mean over images of |z - z'|^2, z and z' the l2-normalised representations of two views of an image.

    Wang & Isola 2020, section 4.1.1, with alpha = 2; `first` and `second` are [n, d], in the same order. The value is
    between 0 (both views have the same representation) and 4. A collapsed representation is perfectly aligned, so read
    it beside `uniformity`. A zero vector stays zero.
    """
    difference = F.normalize(first.detach().double(), dim=1) - F.normalize(second.detach().double(), dim=1)
    return float(difference.square().sum(dim=1).mean())


def uniformity(features: Tensor) -> float:
    """Return log of the mean over pairs i < j of exp(-2 |z_i - z_j|^2), z the l2-normalised representations [n, d].

    Wang & Isola 2020, section 4.1.2, with t = 2. The lower, the more uniform: 0 where all representations are one
    point, about -4 for uniform ones in many dimensions, where squared distances are near 2. A zero vector stays zero.
    """
    distances = torch.pdist(F.normalize(features.detach().double(), dim=1))
    return float((-2 * distances.square()).logsumexp(dim=0)) - math.log(len(distances))


def view_retrieval(views: Sequence[Tensor]) -> float | None:
    """Return the percentage of images whose first view is more like their second view than like any other image's.

    `views` are two matrices [v, d], rows of the same image in the same order; likeness is the cosine after centring.
    Chance is 100 / v, and ties count as missed, so that one point has 0. None without two images.
    """
    if not views or len(views[0]) < 2:
        return None
    first, second = (F.normalize(view.detach().double() - view.double().mean(dim=0), dim=1) for view in views)
    similarity = first @ second.T
    own = similarity.diagonal().clone()
    similarity.fill_diagonal_(-math.inf)
    return 100.0 * float((own > similarity.amax(dim=1) + 1e-9).double().mean())


_ENTRIES = (
    Metric("knn", "kNN accuracy", "%", printed=True),
    Metric("linear", "linear accuracy", "%", printed=True),
    Metric("linear_0.01", "linear accuracy, 1 % of the labels", "%"),
    Metric("linear_0.1", "linear accuracy, 10 % of the labels", "%"),
    Metric("classifier", "own classifier's accuracy", "%", on_other_data=False),
    Metric("linear_auroc", "linear AUROC", "%", images="unlabelled", printed=True),
    Metric("semi_supervised_0.01", "fine-tuned on 1 %", "%"),
    Metric("semi_supervised_0.1", "fine-tuned on 10 %", "%"),
    Metric("fine_tune_accuracy", "fine-tuned accuracy", "%", in_bars=False),
    Metric("fine_tune_per_class_accuracy", "fine-tuned per-class accuracy", "%", in_bars=False),
    Metric("fine_tune_precision", "fine-tuned precision", "%", in_bars=False),
    Metric("fine_tune_recall", "fine-tuned recall", "%", in_bars=False),
    Metric("fine_tune_f1", "fine-tuned F1", "%"),
    Metric(
        "effective_rank",
        "effective rank",
        measure=lambda images: effective_rank(images.features),
        images="all",
        printed=True,
    ),
    Metric(
        "alignment",
        "alignment (lower is closer)",
        decimals=2,
        measure=lambda images: alignment(*images.views),
        images="unlabelled",
        printed=True,
    ),
    Metric(
        "uniformity",
        "uniformity (lower is more even)",
        decimals=2,
        # each pair is compared
        measure=lambda images: uniformity(images.features[:1000]) if len(images.features) > 1 else None,
        images="unlabelled",
        printed=True,
    ),
    Metric(
        "view_retrieval",
        "views that find their image",
        "%",
        measure=lambda images: view_retrieval(images.views),
        images="all",
        printed=True,
    ),
    Metric(
        "pixel_view_retrieval",
        "views that find their image by raw pixels",
        "%",
        measure=lambda images: view_retrieval(images.view_pixels),
        images="all",
        on_other_data=False,
        in_tables=False,
    ),
    Metric(
        "viewed_images",
        "images whose views are compared",
        decimals=0,
        measure=lambda images: float(len(images.views[0])) if images.views else None,
        images="all",
        on_other_data=False,
        in_tables=False,
    ),
    *(
        Metric(name, f"{title} accuracy of raw pixels", "%", on_other_data=False, in_tables=False)
        for name, title in (("pixel_knn", "kNN"), ("pixel_linear", "linear"))
    ),
    Metric("loss", "objective's loss", "", 3, "training"),
    Metric("total_loss", "loss with regularisers", "", 3, "training", in_tables=False),
    Metric("cka", "CKA with the target kernel", "", 3, "training"),
    Metric("gradient_norm", "gradient norm in a round's last step", "", 3, "training", in_tables=False),
    Metric("rank_kept", "share left of a batch's highest rank", "", 3, "training", in_tables=False),
    Metric("local_model_distance", "local model distance", "", 3, "aggregator"),
    Metric("memory", "memory of a training step", "bytes", 3, "training", in_tables=False),
    Metric("cuda_memory", "peak of allocated GPU memory", "bytes", 3, "training", in_tables=False),
    Metric("flops", "operations of a client's round", "FLOPs", 3, "training", in_tables=False),
    Metric("bytes_down", "sent to a client in a round", "bytes", 3, "engine", in_tables=False),
    Metric("bytes_up", "sent by a client in a round", "bytes", 3, "engine", in_tables=False),
    Metric("epsilon", "privacy loss epsilon, largest of any client", "", 3, "engine", in_tables=False),
    Metric("images", "images that a client states", "", 0, "engine", in_tables=False),
    *(
        Metric(name, name, "", 3, "engine", in_tables=False)
        for name in ("missing", "refused", "capped", "dropped", "answers")
    ),
)

#: by name, in the order in which tables and reports show them; a part may log others, which are shown by their names
METRICS = {metric.name: metric for metric in _ENTRIES}

#: metrics of a model's evaluation, before and after training and possibly in between; fine-tuned scores after it alone
EVALUATED = tuple(metric.name for metric in _ENTRIES if metric.written_by == "evaluation")


def measured_values(images: MeasuredImages) -> dict[str, float]:
    """Return the values of the metrics that have a function and are defined for these images, by name."""
    kinds = ("all", "unlabelled" if images.labels is None else "labelled")
    values: dict[str, float] = {}
    for metric in METRICS.values():
        if metric.measure is not None and metric.images in kinds and (value := metric.measure(images)) is not None:
            values[metric.name] = value
    return values


def is_measure(metric: str) -> bool:
    """Check whether a model's evaluation writes this metric, on the run's data or on other data."""
    name = metric.partition(OF_ARCHITECTURE)[0]
    return name in EVALUATED or name.startswith(("linear_", "semi_supervised_", "fine_tune_", DOWNSTREAM))


def is_reserved(metric: str) -> bool:
    """Check whether this metric, or one of which a reader thinks so, is not of training: clients must not send it."""
    name = _words(metric)
    others = (entry for entry in METRICS.values() if entry.written_by != "training")
    return OF_ARCHITECTURE in metric or is_measure(name) or any(name in map(_words, (e.name, e.title)) for e in others)


def _words(name: str) -> str:
    return "_".join(re.findall(r"[a-z0-9.]+", name.lower()))


def is_accuracy(metric: str) -> bool:
    """Check whether a metric is in percent."""
    _, name = split_metric(metric)
    return name.startswith(("linear_", "semi_supervised_")) or (name in METRICS and METRICS[name].unit == "%")


def split_metric(metric: str) -> tuple[str, str]:
    """Return the label of other data, empty for the run's own, and the name: `downstream_cifar10_knn` is on cifar10."""
    metric = metric.partition(OF_ARCHITECTURE)[0]
    if not metric.startswith(DOWNSTREAM):
        return "", metric
    label, _, name = metric.removeprefix(DOWNSTREAM).partition("_")
    return label, name


def metric_title(metric: str) -> str:
    """Return a metric's title with its unit; a metric that is not in `METRICS` keeps its name, with spaces."""
    metric, _, architecture = metric.partition(OF_ARCHITECTURE)
    if architecture:
        return f"{metric_title(metric)}, {'worst client' if architecture == WORST_CLIENT else architecture}"
    label, name = split_metric(metric)
    if label:
        return f"on {label}: {metric_title(name)}"
    if metric not in METRICS:
        return metric.replace("_", " ")
    entry = METRICS[metric]
    return f"{entry.title} ({entry.unit})" if entry.unit else entry.title


def short_title(metric: str) -> str:
    """Return a title for the narrow columns of a terminal, such as `kNN %`."""
    return metric_title(metric).replace(" accuracy", "").replace(" (%)", " %")


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of one or more values and their sample standard deviation, None for a single value.

    Both are NaN where a value is not finite, or so large that its square would not be.
    """
    if not all(abs(value) < LARGEST_FIGURE for value in values):
        return math.nan, math.nan if len(values) > 1 else None
    return fmean(values), stdev(values) if len(values) > 1 else None


def format_values(metric: str, values: Sequence[float]) -> str:
    """Return `91.3 ± 0.4` for several seeds, `91.3` for one, a dash for none."""
    if not values:
        return "-"
    _, name = split_metric(metric)
    decimals = METRICS[name].decimals if name in METRICS else 1 if is_measure(metric) else 3
    mean, spread = mean_and_spread(values)
    return f"{mean:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
