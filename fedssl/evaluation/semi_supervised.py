"""Semi-supervised evaluation: encoder and linear layer fine-tuned on a small labelled part of the data."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..data.stored_images import Images
from ..errors import UserError
from ..options import Options
from .features import device_of
from .fine_tuning import Augmentation, FineTuning, fine_tuned_network, predict_classes
from .protocols import with_given_values

#: by name; see `semi_supervised_accuracy` for the sources
PROTOCOLS = {
    "hetero_ssfl": FineTuning(epochs=100, batch_size=512, optimizer="nesterov", learning_rate=0.05),
    "fedu2": FineTuning(
        epochs=200,
        batch_size=128,
        optimizer="sgd",
        learning_rate=1e-3,
        classifier_learning_rate=0.3,
        augmentation="crop_and_flip",
    ),
    "lw_fedssl": FineTuning(
        epochs=40,
        batch_size=256,
        optimizer="adamw",
        learning_rate=1e-3,
        weight_decay=1e-5,
        warmup_epochs=10,
        augmentation="rand_augment",
    ),
}
#: Hetero-SSFL's batch where at most so large a share of the labels is used
_FEW_LABELS, _BATCH_OF_FEW_LABELS = 0.01, 256


class SemiSupervisedOptions(Options):
    """How encoder and linear layer are fine-tuned on a part of the labels: a protocol, and what replaces its values."""

    name: Literal["hetero_ssfl", "fedu2", "lw_fedssl"] = Field(
        "hetero_ssfl", description="the paper whose protocol is followed; it gives each value that is not set"
    )
    epochs: int | None = Field(
        None, ge=1, description="passes over the labelled images; hetero_ssfl 100, fedu2 200, lw_fedssl 40"
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="labelled images a step; hetero_ssfl 512, or 256 up to a fraction of 0.01, fedu2 128, lw_fedssl "
        "256",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="of the encoder; hetero_ssfl 0.05, fedu2 0.001, lw_fedssl 0.001"
    )
    classifier_learning_rate: float | None = Field(
        None, gt=0, description="of the linear layer; fedu2 0.3, the others that of the encoder"
    )
    warmup_epochs: int | None = Field(
        None,
        ge=0,
        description="epochs in which the learning rates rise, before they fall as a cosine; lw_fedssl 10, the others "
        "none: their rates are constant",
    )
    augmentation: Augmentation | None = Field(
        None, description="of the labelled images; hetero_ssfl none, fedu2 crop_and_flip, lw_fedssl rand_augment"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SemiSupervisedOptions:
        tuning = self.tuning(1.0)
        if tuning.warmup_epochs is not None and tuning.warmup_epochs >= tuning.epochs:
            raise ValueError(
                f"warmup_epochs must be below epochs, {tuning.epochs}, got {tuning.warmup_epochs} with the protocol "
                f"{self.name}"
            )
        return self

    def tuning(self, fraction: float) -> FineTuning:
        """The named protocol for a labelled fraction, with the values that are set."""
        protocol = PROTOCOLS[self.name]
        if self.name == "hetero_ssfl" and fraction <= _FEW_LABELS:
            protocol = dataclasses.replace(protocol, batch_size=_BATCH_OF_FEW_LABELS)
        return with_given_values(protocol, self)


def semi_supervised_accuracy(
    encoder: nn.Module,
    train_images: Images,
    train_labels: Tensor,
    test_images: Images,
    test_labels: Tensor,
    classes: int,
    fraction: float,
    options: SemiSupervisedOptions,
    seed: int,
    device: torch.device | str | None = None,
) -> float:
    """Test accuracy, in percent, of a copy of the encoder fine-tuned with a linear layer on few labels.

    The loss is cross-entropy. In a batch of one image, BatchNorm uses its running statistics. The protocols:

    `hetero_ssfl` (Hetero-SSFL, appendix B): 100 epochs of SGD with Nesterov momentum 0.9, learning rate 0.05, batches
    of 256 for 1 % of the labels and of 512 for 10 %. The paper names no loss, augmentation, weight decay or
    learning-rate decay; there is none of the last three.

    `fedu2` (FedU2's released code, semi_eval.py; the paper gives no values): 200 epochs of SGD with momentum 0.9,
    learning rate 0.001 for the encoder and 0.3 for the linear layer, batches of 128, a square crop of 0.64 to 1 of the
    area, and a mirror image in half of the cases. Deviations: the code scores the test images after 100 and 200 epochs
    and prints the higher score, which chooses by the test images; here the score after the last epoch counts. The code
    does not normalise images; here they are normalised as in training.

    `lw_fedssl` (LW-FedSSL, section 4.1): 40 epochs of AdamW with learning rate 0.001 and weight decay 1e-5, batches of
    256, 10 epochs of linear warm-up and then a cosine decay, RandAugment. The paper uses all labels, as
    `fine_tuned_scores` does; on a part of them this is our use of its values.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d]. It is copied, and
            not changed itself.
        train_images: uint8 [n, C, H, W]; the labelled part is drawn from them by `labeled_subset`.
        train_labels: integer [n], 0 to classes - 1.
        test_images: uint8 [m, C, H, W].
        test_labels: integer [m], 0 to classes - 1.
        classes: number of outputs of the linear layer.
        fraction: share of each class whose labels are used, above 0 and at most 1.
        options: the protocol, and what replaces its values.
        seed: decides the labelled part, the linear layer, the order of the batches, the augmentation and any dropout.
            The same seed gives the same result; torch's global random generators are left as they were.
        device: where to compute (default: where the encoder is).

    Returns:
        Percentage of the m test images that are classified correctly, 0 to 100.

    Raises:
        UserError: the fraction is out of range, or fine-tuning diverged.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction: expected above 0 and at most 1, got {fraction}")
    device = device_of(encoder) if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    labeled = labeled_subset(train_labels, fraction, generator)
    images = train_images[labeled.to(train_images.device)]
    labels = train_labels.to(images.device, torch.int64)[labeled.to(images.device)]
    tuning = options.tuning(fraction)
    network = fine_tuned_network(encoder, images, labels, classes, tuning, seed, generator, device)
    largest_rate = max(tuning.learning_rate, tuning.classifier_learning_rate or 0.0)
    predicted = predict_classes(network, test_images, largest_rate, device)
    return 100.0 * int((predicted == test_labels.cpu()).sum()) / len(test_images)


def labeled_subset(labels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Draw the samples whose labels may be used: the same fraction of every class, at least one of each.

    From a class with c samples, max(1, round(fraction * c)) are drawn without replacement; halves are rounded up.
    With classes of equal size, such as CIFAR's, this is the class-balanced subset of the literature.

    Args:
        labels: integer [n].
        fraction: above 0 and at most 1.
        generator: on the CPU; the only source of randomness.

    Returns:
        int64 indices into `labels`, ascending, on the CPU.
    """
    labels = labels.cpu()
    chosen = []
    for label in labels.unique():
        members = (labels == label).nonzero().squeeze(1)
        count = max(1, int(fraction * len(members) + 0.5))
        chosen.append(members[torch.randperm(len(members), generator=generator)[:count]])
    return torch.cat(chosen).sort().values
