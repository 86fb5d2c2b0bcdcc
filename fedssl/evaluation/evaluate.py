"""All measures of one model on one data set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkernels import ViewKey

from ..augmentations.base import Augmentation, draw_views
from ..augmentations.random_views import RandomViews
from ..data.datasets import Dataset
from ..errors import UserError
from ..models.model import CLASSIFIER, Model
from ..randomness import seed_for
from .alignment import alignment
from .features import extract_features, extract_view_features
from .fine_tune import FineTuneOptions, fine_tuned_scores
from .knn import knn_accuracy
from .linear import linear_accuracy, linear_auroc
from .options import EvaluationOptions
from .semi_supervised import semi_supervised_accuracy
from .spectrum import effective_rank, singular_values
from .uniformity import uniformity

_COMPARED_IMAGES = 1000  # uniformity compares each pair of them
_VIEWS_AT_A_TIME = 100  # bounds the memory of augmenting large images


def evaluate_model(
    model: Model,
    dataset: Dataset,
    options: EvaluationOptions,
    seed: int,
    *,
    linear: bool,
    fractions: Sequence[float] = (),
    fine_tune: FineTuneOptions | None = None,
    augmentation: Augmentation = RandomViews(),  # noqa: B008 (frozen)
    own_classes: bool = True,
) -> tuple[dict[str, float], Tensor]:
    """Measure a model's encoder.

    The labels of the whole training set are used here, and nowhere in self-supervised training. Without labels no
    accuracy is measured.

    Args:
        model: its encoder is measured, on the model's device.
        dataset: training and test images.
        options: of kNN, of the linear evaluation, and how to fine-tune on `fractions`.
        seed: decides all that the evaluations draw.
        linear: whether to train the linear evaluation.
        fractions: labelled fractions to fine-tune on.
        fine_tune: how to fine-tune on all labels; None leaves that out.
        augmentation: makes the two views that `alignment` compares; only for images without labels.
        own_classes: whether the labels are those that the model was trained on. Its own classifier, if it has one, is
            measured on no others.

    Returns:
        The metrics by name, and the singular values of the test images' representations, float64, descending.
        Accuracies on the test images are in percent: `knn`, `linear`, and `semi_supervised_FRACTION` for each of
        `fractions`; for a supervised model also `classifier`, the accuracy of its own classifier. `effective_rank` is
        that of the test images' representations. The scores after fine-tuning on all labels are `fine_tune_accuracy`
        and the macro averages `fine_tune_per_class_accuracy`, `fine_tune_precision`, `fine_tune_recall` and
        `fine_tune_f1`. Without labels the measures are `effective_rank`, `alignment` and `uniformity`, of
        `Dataset.measured_images`; with several labels an image also `linear_auroc`, if `linear`.

    Raises:
        UserError: a representation is not finite, or an evaluation's own training diverged; or fine-tuning is asked for
            and there are no labels.
    """
    check_labels(dataset, fractions, fine_tune)
    if not dataset.labelled:
        features = extract_features(model.encoder, dataset.measured_images, device=model.device)
        metrics, spectrum = _measures_without_classes(model, dataset, features, augmentation, seed)
        if linear and (auroc := _linear_auroc(model, dataset, features, options, seed)) is not None:
            metrics["linear_auroc"] = auroc
        return metrics, spectrum
    train = extract_features(model.encoder, dataset.train_images, device=model.device)
    test = extract_features(model.encoder, dataset.test_images, device=model.device)
    labelled = (train, dataset.train_labels, test, dataset.test_labels)
    metrics = {
        "knn": knn_accuracy(*labelled, neighbors=options.neighbors, temperature=options.temperature),
        "effective_rank": effective_rank(test),
    }
    if own_classes and CLASSIFIER in model.online:
        metrics["classifier"] = _classifier_accuracy(model, test, dataset.test_labels)
    if linear:
        metrics["linear"] = linear_accuracy(*labelled, len(dataset.class_names), options.linear, seed)
    for fraction in fractions:
        metrics[f"semi_supervised_{fraction:g}"] = semi_supervised_accuracy(
            model.encoder,
            dataset.train_images,
            dataset.train_labels,
            dataset.test_images,
            dataset.test_labels,
            len(dataset.class_names),
            fraction,
            options.semi_supervised_protocol,
            seed,
            model.device,
        )
    if fine_tune is not None:
        scores = fine_tuned_scores(model.encoder, dataset, fine_tune, seed, model.device)
        metrics |= {f"fine_tune_{name}": value for name, value in scores.items()}
    return metrics, singular_values(test)


@torch.no_grad()
def _classifier_accuracy(model: Model, features: Tensor, labels: Tensor) -> float:
    """Accuracy in percent of the model's own classifier on representations [m, d] with int64 `labels` [m]."""
    predicted = model.online[CLASSIFIER](features.to(model.device)).argmax(dim=1).cpu()
    return 100.0 * int((predicted == labels.cpu()).sum()) / len(features)


def check_labels(dataset: Dataset, fractions: Sequence[float], fine_tune: FineTuneOptions | None) -> None:
    """Raise a UserError where fine-tuning is asked for and the images have no labels."""
    if not dataset.labelled and (fractions or fine_tune is not None):
        what = "semi-supervised evaluation" if fractions else "fine-tuning"
        raise UserError(
            f"{what} needs labels, and the images of data.name={dataset.name} have none: leave it out, or give labels "
            "(data.labels for images, y_train and y_test in an .npz file)"
        )


def _measures_without_classes(
    model: Model, dataset: Dataset, features: Tensor, augmentation: Augmentation, seed: int
) -> tuple[dict[str, float], Tensor]:
    """Measures that need no labels, of the measured images, whose representations are `features` [m, d]."""
    images = dataset.measured_images
    key = ViewKey(seed_for(seed, "alignment"))
    pairs = []
    for rows in torch.arange(min(len(images), _COMPARED_IMAGES)).split(_VIEWS_AT_A_TIME):
        views = draw_views(augmentation, images[rows], rows, key, model.device)
        pairs.append([extract_view_features(model.encoder, view, device=model.device) for view in views])
    first, second = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    metrics = {"effective_rank": effective_rank(features), "alignment": alignment(first, second)}
    if len(features) > 1:
        metrics["uniformity"] = uniformity(features[:_COMPARED_IMAGES])
    return metrics, singular_values(features)


def _linear_auroc(
    model: Model, dataset: Dataset, features: Tensor, options: EvaluationOptions, seed: int
) -> float | None:
    """See `linear_auroc`, with the test images' representations `features` [m, d].

    None where the images do not have several labels each.
    """
    if dataset.train_targets is None or dataset.test_targets is None:
        return None
    train = extract_features(model.encoder, dataset.train_images, device=model.device)
    return linear_auroc(train, dataset.train_targets, features, dataset.test_targets, options.linear, seed)
