"""Fine-tuning on all labels of the training or validation images, with warm-up, cosine decay and RandAugment."""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from ..data.datasets import Dataset
from ..errors import UserError
from ..options import Options
from .classification import classification_scores
from .features import device_of
from .fine_tuning import FineTuning, fine_tuned_network, predict_classes


class FineTuneOptions(Options):
    """How the encoder is fine-tuned; the defaults are those of the LW-FedSSL paper, section 4.1.

    For MedMNIST the paper fine-tunes on the validation split (section 4.8).
    """

    images: Literal["train", "validation"] = Field("train", description="split whose labelled images are trained on")
    epochs: int = Field(40, ge=1, description="passes over these images")
    warmup_epochs: int = Field(10, ge=0, description="epochs in which the learning rate rises; below epochs")
    batch_size: int = Field(256, ge=1, description="images a step")
    learning_rate: float = Field(1e-3, gt=0, description="of AdamW, after the warm-up")
    weight_decay: float = Field(1e-5, ge=0, description="of AdamW")
    rand_augment: bool = Field(True, description="whether images are augmented by torchvision's RandAugment")

    @model_validator(mode="after")
    def _consistent(self) -> "FineTuneOptions":
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs must be below epochs, {self.epochs}, got {self.warmup_epochs}")
        return self

    def tuning(self) -> FineTuning:
        """The same for the loop that every fine-tuning shares."""
        return FineTuning(
            epochs=self.epochs,
            batch_size=self.batch_size,
            optimizer="adamw",
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_epochs=self.warmup_epochs,
            augmentation="rand_augment" if self.rand_augment else "none",
        )


def check_fine_tuning(options: FineTuneOptions | None, dataset: Dataset) -> None:
    """Raise a UserError where the fine-tuning needs a validation split that the data do not have."""
    if options is not None and options.images == "validation" and dataset.validation_images is None:
        raise UserError(
            "evaluation.fine_tune.images is validation, but the data have no validation split: use train, or an .npz "
            "file with x_val and y_val (in MedMNIST val_images and val_labels)"
        )


def fine_tuned_scores(
    encoder: nn.Module,
    dataset: Dataset,
    options: FineTuneOptions,
    seed: int,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Test scores, in percent, of a copy of the encoder fine-tuned with a linear layer on top.

    The protocol is that of the LW-FedSSL paper, section 4.1: a linear head on the encoder, both trained for 40 epochs
    by AdamW (learning rate 1e-3, weight decay 1e-5, batches of 256) with 10 epochs of warm-up and a cosine decay after
    it, under torchvision's RandAugment with its own defaults. The paper leaves open the following: here the loss is
    cross-entropy, the warm-up is linear, and the rate changes with every step. Images keep their size.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d]. It is copied, and not
            changed itself.
        dataset: has the test images and the labelled ones that `options.images` names.
        options: see `FineTuneOptions`.
        seed: decides the linear layer, the order of the batches, the augmentation and any dropout. The same seed gives
            the same result; torch's global random generators are left as they were.
        device: where to compute (default: where the encoder is).

    Returns:
        See `classification_scores`.

    Raises:
        UserError: the data lack the validation split that `options.images` names, or fine-tuning diverged.
    """
    check_fine_tuning(options, dataset)
    images, labels = dataset.train_images, dataset.train_labels
    if options.images == "validation":
        assert dataset.validation_images is not None
        assert dataset.validation_labels is not None
        images, labels = dataset.validation_images, dataset.validation_labels
    device = device_of(encoder) if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    classes = len(dataset.class_names)
    network = fine_tuned_network(encoder, images, labels, classes, options.tuning(), seed, generator, device)
    predicted = predict_classes(network, dataset.test_images, options.learning_rate, device)
    return classification_scores(predicted, dataset.test_labels)
