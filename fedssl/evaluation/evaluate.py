"""The evaluation of a model: all metrics on the run's own data, and on other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedkernels import ViewKey

from ..augmentations.base import Augmentation, draw_views
from ..augmentations.random_views import RandomViews
from ..data.datasets import Dataset, load_dataset
from ..data.options import DataOptions
from ..data.pixels import in_channels, normalize, resize
from ..data.stored_images import Images, images_of_rows
from ..errors import UserError, explained
from ..models.encoders import probe
from ..models.model import CLASSIFIER, Model
from ..options import LABEL_PATTERN, Options
from ..randomness import generator_for, seed_for
from .features import extract_features, extract_outputs, measured_on
from .fine_tuning import (
    FineTuneOptions,
    SemiSupervisedOptions,
    fine_tuned_scores,
    labeled_subset,
    semi_supervised_accuracy,
)
from .linear import LinearOptions, linear_accuracy, linear_auroc
from .metrics import DOWNSTREAM, MeasuredImages, knn_accuracy, measured_values, singular_values

_VIEWED_IMAGES = 1000  # alignment compares two views of so many images
_IMAGES_PER_VIEWED = 4  # of a sample
_DRAWS_OF_LABELS = 5
_VIEWS_AT_A_TIME = 100  # bounds the memory of augmenting large images
_COMPARED_SIDE = 32  # of raw pixels


class EvaluationOptions(Options):
    """The evaluation of models. kNN and linear evaluation use the labelled training images."""

    every: int = Field(0, ge=0, description="rounds between kNN evaluations; 0 evaluates before and after training")
    keep_best: bool = Field(
        False,
        description="keep the models of the evaluated round in which most views find their image, for fedssl export "
        "--best; needs `every`",
    )
    patience: int | None = Field(
        None,
        ge=1,
        description="end the run, unfinished, after so many evaluations without a better round, which is kept; null: "
        "never",
    )
    images: int | None = Field(
        None,
        ge=2,
        description="most images that a model is measured on, training and test images together, drawn by the seed "
        "with each class in its share; null measures on all. Presets choose a number for images of your own, so that "
        "measuring takes at most about 5 % of a run; fine-tuning and fedssl evaluate use all images",
    )
    neighbors: int = Field(
        20, ge=1, description="training images that vote in the kNN evaluation; 200 in FedU2's and EasyFL's code"
    )
    temperature: float = Field(
        0.1, gt=0, description="of the kNN votes; a lower one gives the nearest images more weight"
    )
    linear: LinearOptions = Field(LinearOptions(), description="the linear evaluation after training")
    few_labels: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=list,
        description="fractions of the labels, of the images that `images` leaves, with which the linear layer is "
        "trained as well, such as 0.01 and 0.1; each is the mean over five draws",
    )
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
    downstream: dict[Annotated[str, Field(pattern=LABEL_PATTERN)], DataOptions] | None = Field(
        None,
        description="other data to evaluate on before and after training, each with a label of letters and digits; the "
        "measures are called downstream_LABEL_knn and so on",
    )

    @property
    def keeps_best(self) -> bool:
        """Return whether the best round is kept, for which views are measured whenever models are."""
        return self.keep_best or self.patience is not None

    @model_validator(mode="after")
    def _choice(self) -> EvaluationOptions:
        if self.keeps_best and not self.every:
            raise ValueError("keep_best and patience choose among the evaluated rounds: set every as well, such as 5")
        return self


def check_evaluation(dataset: Dataset, options: EvaluationOptions, needs_labels: bool = True) -> None:
    """Raise a UserError where fine-tuning or few labels ask for what the images do not have.

    It is the channels that RandAugment is for, a validation split, and with `needs_labels` labels.
    """
    few = options.semi_supervised_protocol if options.semi_supervised else None
    channels = dataset.train_images.shape[1]
    for key, protocol in (("semi_supervised_protocol", few), ("fine_tune", options.fine_tune)):
        if protocol is not None and protocol.tuning().augmentation == "rand_augment" and channels not in (1, 3):
            raise UserError(
                f"RandAugment is for images of 1 or 3 channels, and the images have {channels}: set "
                f"evaluation.{key}.augmentation=none"
            )
    if options.fine_tune is not None and options.fine_tune.images == "validation" and dataset.validation_images is None:
        raise UserError(
            "evaluation.fine_tune.images is validation, but the data have no validation split: use train, or an .npz "
            "file with x_val and y_val (in MedMNIST val_images and val_labels)"
        )
    asked = bool(options.few_labels or options.semi_supervised or options.fine_tune is not None)
    if needs_labels and asked and not dataset.labelled:
        raise UserError(
            "evaluation.few_labels, semi_supervised or fine_tune need labels, and the images of "
            f"data.name={dataset.name} have none: leave it out, or give labels (data.labels for images, y_train and "
            "y_test in an .npz file)"
        )


def measured_sample(dataset: Dataset, images: int | None, seed: int) -> Dataset:
    """Return the part of a dataset on which models are measured: at most so many images, half of them for testing.

    Each class has its share, within one image. Without classes or several labels an image, only those images are drawn
    that take the place of the test images. `images` of None, or of no fewer than there are, returns the dataset.
    """
    with_training = dataset.labelled or dataset.train_targets is not None
    pool = dataset.test_images if with_training else dataset.measured_images
    if images is None or images >= len(pool) + with_training * len(dataset.train_images):
        return dataset
    if not with_training:
        labels = torch.zeros(len(pool), dtype=torch.int64)
        chosen = images_of_rows(pool, _stratified(labels, images, generator_for(seed, "measured", "images")))
        return dataclasses.replace(dataset, test_images=chosen, test_labels=labels[: len(chosen)], test_targets=None)
    tested = min(len(pool), max(images // 2, images - len(dataset.train_images)))
    parts: dict[str, Any] = {}
    for name, count in (("test", tested), ("train", images - tested)):
        labels, targets = getattr(dataset, f"{name}_labels"), getattr(dataset, f"{name}_targets")
        rows = _stratified(labels, count, generator_for(seed, "measured", name))
        parts[f"{name}_images"] = images_of_rows(getattr(dataset, f"{name}_images"), rows)
        parts |= {f"{name}_labels": labels[rows], f"{name}_targets": None if targets is None else targets[rows]}
    return dataclasses.replace(dataset, **parts)


def _stratified(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` row numbers, ascending, of which each class has its share within one."""
    order = torch.randperm(len(labels), generator=generator)
    by_class = order[labels[order].argsort(stable=True)]
    chosen = ((torch.arange(count, dtype=torch.float64) + 0.5) * len(labels) / count).long()
    return by_class[chosen].sort().values


def sample_sentence(dataset: Dataset, images: int | None, seed: int) -> str:
    """Return on how many images models are measured, for the log."""
    sample = measured_sample(dataset, images, seed)
    of_test = f"{len(sample.measured_images):,} of {len(dataset.measured_images):,}"
    kind = "test" if len(dataset.test_images) else "training"
    parts = [f"{of_test} {kind} images"]
    if dataset.labelled or dataset.train_targets is not None:
        parts.insert(0, f"{len(sample.train_images):,} of {len(dataset.train_images):,} training images")
    advice = "" if sample is dataset else " (evaluation.images=null, or fedssl evaluate afterwards, measures on all)"
    return f"models are measured on {' and '.join(parts)}{advice}"


def evaluate_model(
    model: Model,
    dataset: Dataset,
    options: EvaluationOptions,
    seed: int,
    *,
    linear: bool,
    fine_tune: bool = False,
    augmentation: Augmentation = RandomViews(),  # noqa: B008 (frozen)
    own_classes: bool = True,
) -> tuple[dict[str, float], Tensor]:
    """Measure a model's encoder, on `measured_sample` of the dataset; fine-tuning takes all of it.

    The labels of the whole training set are used here, and nowhere in self-supervised training. On a GPU kNN and the
    linear evaluation run there if its free memory is at least eight times the representations'; other measures are in
    float64, and run on the CPU.

    Args:
        model: its encoder is measured, on the model's device.
        seed: decides every random draw.
        linear: whether to train the linear evaluation.
        fine_tune: whether to fine-tune as the options say, which may be not at all; not without labels.
        augmentation: makes the two views that `alignment` and `view_retrieval` compare.
        own_classes: whether the labels are those that the model was trained on. Its own classifier, if it has one, is
            measured on no others.

    Returns:
        The metrics by name, and the singular values of the test images' representations, float64, descending. The
        names and units are those of `METRICS`, and `linear_FRACTION` and `semi_supervised_FRACTION` for any other
        fraction. Without labels no accuracy is measured, `linear_auroc` only with several labels an image, and
        `Dataset.measured_images` take the place of the test images. No accuracy is measured either where the training
        or the test images are of one class.

    Raises:
        UserError: a representation is not finite, or an evaluation's own training diverged.
    """
    whole, dataset = dataset, measured_sample(dataset, options.images, seed)
    encoder, images = model.encoder, dataset.measured_images
    test = extract_features(encoder, images)
    measured = MeasuredImages(test, dataset.test_labels if dataset.labelled else None)
    if not dataset.labelled or (own_classes and (linear or options.keeps_best)):  # before and after training
        if not dataset.labelled and dataset is not whole:  # a view costs as much as an image
            images = images_of_rows(images, slice(max(2, len(images) // _IMAGES_PER_VIEWED)))
        views, pixels = _view_features(model, images, augmentation, seed)
        measured = measured._replace(views=views, view_pixels=pixels)
    metrics, spectrum = measured_values(measured), singular_values(test)
    if dataset.labelled and not _several_classes(dataset):  # an accuracy says nothing
        return metrics, spectrum
    if not dataset.labelled:
        if linear and dataset.train_targets is not None and dataset.test_targets is not None:
            train, test = measured_on(model.device, extract_features(encoder, dataset.train_images), test)
            auroc = linear_auroc(train, dataset.train_targets, test, dataset.test_targets, options.linear, seed)
            metrics |= {} if auroc is None else {"linear_auroc": auroc}
        return metrics, spectrum
    train, test_on_device = measured_on(model.device, extract_features(encoder, dataset.train_images), test)
    labelled = (train, dataset.train_labels, test_on_device, dataset.test_labels)
    knn = knn_accuracy(*labelled, neighbors=options.neighbors, temperature=options.temperature)
    metrics = {"knn": knn} | metrics
    if own_classes and CLASSIFIER in model.online:
        with torch.no_grad():
            predicted = model.online[CLASSIFIER](test.to(model.device)).argmax(dim=1).cpu()
        metrics["classifier"] = 100.0 * int((predicted == dataset.test_labels.cpu()).sum()) / len(test)
    if linear:
        classes, labels = len(dataset.class_names), dataset.train_labels
        metrics["linear"] = linear_accuracy(*labelled, classes, options.linear, seed)
        for fraction in options.few_labels:  # of each class its share
            draws = [generator_for(seed, "few labels", str(draw)) for draw in range(_DRAWS_OF_LABELS)]
            metrics[f"linear_{fraction:g}"] = fmean(
                linear_accuracy(train[rows], labels[rows], *labelled[2:], classes, options.linear, seed)
                for rows in (labeled_subset(labels, fraction, generator) for generator in draws)
            )
    for fraction in options.semi_supervised if fine_tune else ():
        metrics[f"semi_supervised_{fraction:g}"] = semi_supervised_accuracy(
            encoder, whole, fraction, options.semi_supervised_protocol, seed
        )
    if fine_tune and options.fine_tune is not None:
        scores = fine_tuned_scores(encoder, whole, options.fine_tune, seed)
        metrics |= {f"fine_tune_{name}": value for name, value in scores.items()}
    return metrics, spectrum


def _several_classes(dataset: Dataset) -> bool:
    return all(len(labels.unique()) > 1 for labels in (dataset.train_labels, dataset.test_labels))


def pixel_accuracies(dataset: Dataset, options: EvaluationOptions, seed: int) -> dict[str, float]:
    """Return the kNN and linear accuracy of raw pixels, to which an encoder is compared; empty without labels.

    The pixels are those of images of at most 32 pixels a side, and all else is as in `evaluate_model`.
    """
    dataset = measured_sample(dataset, options.images, seed)
    if not (dataset.labelled and _several_classes(dataset)):
        return {}
    images = (dataset.train_images, dataset.test_images)
    train, test = (extract_outputs(nn.Flatten(), each, lambda batch: _small(normalize(batch))) for each in images)
    labelled = (train, dataset.train_labels, test, dataset.test_labels)
    return {
        "pixel_knn": knn_accuracy(*labelled, neighbors=options.neighbors, temperature=options.temperature),
        "pixel_linear": linear_accuracy(*labelled, len(dataset.class_names), options.linear, seed),
    }


def _view_features(
    model: Model, images: Images, augmentation: Augmentation, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the representations of two views of each of the first images, [v, d] each, and the views' pixels."""
    key = ViewKey(seed_for(seed, "alignment"))
    features, pixels = [], []
    for rows in torch.arange(min(len(images), _VIEWED_IMAGES)).split(_VIEWS_AT_A_TIME):
        views = draw_views(augmentation, images[rows], rows, key, model.device)
        features.append([extract_features(model.encoder, view, lambda batch: batch) for view in views])
        pixels.append([_small(view).flatten(1).cpu() for view in views])
    joined = [[torch.cat(parts) for parts in zip(*pairs, strict=True)] for pairs in (features, pixels)]
    return joined[0], joined[1]


def _small(view: Tensor) -> Tensor:
    """Return images of at most `_COMPARED_SIDE` pixels a side, as means of their pixels."""
    height, width = view.shape[2:]
    return F.adaptive_avg_pool2d(view, (min(height, _COMPARED_SIDE), min(width, _COMPARED_SIDE)))


def load_downstream(options: DataOptions, image_shape: Sequence[int], seed: int) -> Dataset:
    """Read labelled data in the form that an encoder takes, which was trained on images of `image_shape` [C, H, W].

    Images are resized to the encoder's shape, unless the options name a size of their own, which not every architecture
    takes. The number of channels becomes the encoder's, see `in_channels`. Data without labels or test images are
    refused by a UserError.
    """
    channels, height, width = image_shape
    size = width if height == width else None
    dataset = load_dataset(options.model_copy(update={"image_size": options.image_size or size}), seed)
    has_labels = dataset.labelled or dataset.train_targets is not None
    if not has_labels or not len(dataset.test_images):
        what = "test images" if has_labels else "labels"
        raise UserError(f"the data to evaluate on have no {what}: kNN, linear and fine-tuned accuracy need them")
    images = {part: getattr(dataset, part) for part in ("train_images", "test_images", "validation_images")}
    fitting = {part: in_channels(each, channels) for part, each in images.items() if each is not None}
    if height != width and not options.image_size:
        fitting = {part: resize(each[:], height, width) for part, each in fitting.items()}
    return dataclasses.replace(dataset, **fitting)


def evaluate_downstream(
    model: Model,
    datasets: Mapping[str, Dataset],
    options: EvaluationOptions,
    seed: int,
    views: Augmentation,
    after: bool,
) -> dict[str, float]:
    """Measure a model's encoder on each of other data sets, by label; the metrics are named `downstream_LABEL_METRIC`.

    It is measured by `evaluate_model` with the run's options, and after training also fine-tuned if they ask for it.
    """
    metrics: dict[str, float] = {}
    for label, dataset in datasets.items():
        values, _ = evaluate_model(
            model, dataset, options, seed, linear=True, fine_tune=after, augmentation=views, own_classes=False
        )
        metrics |= {f"{DOWNSTREAM}{label}_{name}": value for name, value in values.items()}
    return metrics


def check_downstream(model: Model, dataset: Dataset, options: EvaluationOptions) -> None:
    """Raise a UserError if an encoder does not take the images of other data, or fine-tuning lacks something."""
    check_evaluation(dataset, options, needs_labels=False)
    shape = tuple(dataset.train_images.shape[1:])
    advice = ": leave out image_size, so that images get the size that it was trained on"
    with explained(f"the encoder does not take images of {' x '.join(map(str, shape))}", advice):
        _, left_out = probe(model.encoder, shape)
        if left_out:
            raise ValueError(f"it would leave out the last {left_out} pixels of a side")
