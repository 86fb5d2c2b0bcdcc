"""All measures of one model on one data set."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..data.datasets import Dataset
from ..models.model import Model
from .features import extract_features
from .fine_tune import FineTuneOptions, fine_tuned_scores
from .knn import knn_accuracy
from .linear import linear_accuracy
from .options import EvaluationOptions
from .semi_supervised import SemiSupervisedOptions, semi_supervised_accuracy
from .spectrum import effective_rank, singular_values


def evaluate_model(
    model: Model,
    dataset: Dataset,
    options: EvaluationOptions,
    seed: int,
    *,
    linear: bool,
    fractions: Sequence[float] = (),
    fine_tune: FineTuneOptions | None = None,
) -> tuple[dict[str, float], Tensor]:
    """Measure a model's encoder.

    The labels of the whole training set are used here, and nowhere in self-supervised training.

    Args:
        model: its encoder is measured, on the model's device.
        dataset: training images with labels, and the test images.
        options: of kNN and the linear evaluation.
        seed: decides all that the evaluations draw.
        linear: whether to train the linear evaluation.
        fractions: labelled fractions to fine-tune on.
        fine_tune: how to fine-tune on all labels; None leaves that out.

    Returns:
        The metrics by name, and the singular values of the test images' representations, float64, descending.
        Accuracies on the test images are in percent: `knn`, `linear`, and `semi_supervised_FRACTION` for each of
        `fractions`. `effective_rank` is that of the test images' representations. The scores after fine-tuning on all
        labels are `fine_tune_accuracy` and the macro averages `fine_tune_per_class_accuracy`, `fine_tune_precision`,
        `fine_tune_recall` and `fine_tune_f1`.

    Raises:
        UserError: a representation is not finite, or an evaluation's own training diverged.
    """
    train = extract_features(model.encoder, dataset.train_images, device=model.device)
    test = extract_features(model.encoder, dataset.test_images, device=model.device)
    labelled = (train, dataset.train_labels, test, dataset.test_labels)
    metrics = {
        "knn": knn_accuracy(*labelled, neighbors=options.neighbors, temperature=options.temperature),
        "effective_rank": effective_rank(test),
    }
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
            SemiSupervisedOptions(fraction=fraction),
            seed,
            model.device,
        )
    if fine_tune is not None:
        scores = fine_tuned_scores(model.encoder, dataset, fine_tune, seed, model.device)
        metrics |= {f"fine_tune_{name}": value for name, value in scores.items()}
    return metrics, singular_values(test)
