"""Data other than the run's, on which an encoder is evaluated: pre-train on one set, evaluate on another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..data.datasets import Dataset, load_dataset
from ..data.options import DataOptions
from ..data.stored_images import Images
from ..errors import UserError
from ..models.model import Model
from .evaluate import evaluate_model
from .fine_tune import check_fine_tuning
from .options import EvaluationOptions

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
