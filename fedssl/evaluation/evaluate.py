"""All measures of one model on one data set."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field, field_validator
from torch import Tensor

from fedkernels import ViewKey

from ..augmentations.base import Augmentation, draw_views
from ..augmentations.random_views import RandomViews
from ..data.datasets import Dataset, load_dataset
from ..data.options import DataOptions
from ..data.stored_images import Images
from ..errors import UserError
from ..models.model import CLASSIFIER, Model
from ..options import Options
from ..randomness import seed_for
from .features import extract_features, extract_view_features
from .fine_tuning import (
    FineTuneOptions,
    SemiSupervisedOptions,
    check_fine_tuning,
    fine_tuned_scores,
    semi_supervised_accuracy,
)
from .linear import LinearOptions, linear_accuracy, linear_auroc
from .measures import alignment, effective_rank, knn_accuracy, singular_values, uniformity


class EvaluationOptions(Options):
    """What is measured, and when. kNN and linear evaluation use the labelled training images."""

    every: int = Field(0, ge=0, description="rounds between kNN evaluations; 0 evaluates before and after training")
    neighbors: int = Field(
        20, ge=1, description="training images that vote in the kNN evaluation; 200 in FedU2's and EasyFL's code"
    )
    temperature: float = Field(
        0.1, gt=0, description="of the kNN votes; a lower one gives the nearest images more weight"
    )
    linear: LinearOptions = Field(LinearOptions(), description="the linear evaluation after training")
    semi_supervised: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=list,
        description="labelled fractions to fine-tune on after training; 0.01 and 0.1 in the papers",
    )
    semi_supervised_protocol: SemiSupervisedOptions = Field(
        SemiSupervisedOptions(), description="how to fine-tune on these fractions"
    )
    fine_tune: FineTuneOptions | None = Field(
        None, description="fine-tune on all labels after training, as LW-FedSSL does; {} for its options"
    )
    downstream: dict[str, DataOptions] | None = Field(
        None,
        description="other data to evaluate on before and after training, each with a label of letters and digits; the "
        "measures are called downstream_LABEL_knn and so on",
    )

    @field_validator("downstream")
    @classmethod
    def _labels(cls, downstream: dict[str, DataOptions] | None) -> dict[str, DataOptions] | None:
        for label in downstream or ():
            if not re.fullmatch("[A-Za-z0-9]+", label):
                raise ValueError(f"the label {label!r} must consist of letters and digits")
        return downstream


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


#: how the names of measures on other data begin: downstream_LABEL_MEASURE
PREFIX = "downstream_"


_CONVERTED_AT_A_TIME = 1024


def load_downstream(options: DataOptions, image_shape: Sequence[int], seed: int) -> Dataset:
    """Labelled data in the form that an encoder takes.

    Images are resized to the encoder's size, unless the options name a size of their own, which not every architecture
    takes. Grey images are repeated for an encoder of colour images, and colour becomes its luma for one of grey images.

    Args:
        options: which data.
        image_shape: channels, height and width of the images that the encoder was trained on.
        seed: decides the parts of the data that limits draw.

    Raises:
        UserError: see `load_dataset`; or the data have no labels or no test images.
    """
    channels, _, width = image_shape
    dataset = load_dataset(options.model_copy(update={"image_size": options.image_size or width}), seed)
    has_labels = dataset.labelled or dataset.train_targets is not None
    if not has_labels or not len(dataset.test_images):
        what = "test images" if has_labels else "labels"
        raise UserError(f"the data to evaluate on have no {what}: kNN, linear and fine-tuned accuracy need them")
    validation = dataset.validation_images
    return dataclasses.replace(
        dataset,
        train_images=_in_channels(dataset.train_images, channels),
        test_images=_in_channels(dataset.test_images, channels),
        validation_images=None if validation is None else _in_channels(validation, channels),
    )


def _in_channels(images: Images, channels: int) -> Images:
    """`in_channels`; images that lie in a file are read into the memory only where they change."""
    if images.shape[1] == channels:
        return images
    return torch.cat([in_channels(part, channels) for part in images.split(_CONVERTED_AT_A_TIME)])


def in_channels(images: Tensor, channels: int) -> Tensor:
    """uint8 images [n, 1 or 3, H, W] as grey (1) or colour (3): grey is repeated, colour becomes its luma."""
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1).contiguous()
    from torchvision.transforms.v2 import functional

    grey: Tensor = functional.rgb_to_grayscale(images)
    return grey


def evaluate_downstream(
    model: Model, datasets: Mapping[str, Dataset], options: EvaluationOptions, seed: int, *, after: bool
) -> dict[str, float]:
    """`evaluate_model` on each of other data sets, with the run's evaluation options.

    Args:
        model: its encoder is measured.
        datasets: by label, see `load_downstream`.
        options: of every evaluation; kNN, effective rank and linear accuracy are always measured.
        seed: decides all that the evaluations draw.
        after: whether training has ended, so that fine-tuning is measured too, if the options ask for it.

    Returns:
        The measures, named `downstream_LABEL_MEASURE`.
    """
    measures: dict[str, float] = {}
    for label, dataset in datasets.items():
        values, _ = evaluate_model(
            model,
            dataset,
            options,
            seed,
            linear=True,
            fractions=options.semi_supervised if after else (),
            fine_tune=options.fine_tune if after else None,
            own_classes=False,
        )
        measures |= {f"{PREFIX}{label}_{name}": value for name, value in values.items()}
    return measures


def check_downstream(model: Model, dataset: Dataset, options: EvaluationOptions) -> None:
    """Check that an encoder takes the images of other data, and that they have the split that fine-tuning needs.

    Raises:
        UserError: they do not go together.
    """
    check_fine_tuning(options.fine_tune, dataset)
    shape = tuple(dataset.train_images.shape[1:])
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval().encoder(torch.zeros(1, *shape, device=model.device))
    except Exception as error:  # each of timm's files raises its own for an image that does not fit
        size = " x ".join(map(str, shape))
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the encoder does not take images of {size} ({reason}): leave out image_size, so that images get the size "
            "that it was trained on"
        ) from error
    finally:
        model.train(was_training)
