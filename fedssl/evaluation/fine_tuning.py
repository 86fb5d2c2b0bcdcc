"""Fine-tuning: a copy of an encoder is trained together with a linear layer on labelled images, and then tested."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from fedkernels import ViewKey

from ..augmentations.base import draw_views
from ..augmentations.random_views import CROP_AND_FLIP
from ..data.datasets import Dataset
from ..data.pixels import normalize
from ..data.stored_images import Images
from ..errors import UserError
from ..models.trained_part import merged
from ..options import Options
from ..randomness import generators_set_to, seed_for
from .features import device_of, extract_features, extract_outputs

Augmentation = Literal["none", "crop_and_flip", "rand_augment"]


class FineTuning(NamedTuple):
    """The training of an encoder together with a linear layer; the loss is cross-entropy.

    Attributes:
        optimizer: SGD with momentum 0.9, the same with Nesterov's momentum, or AdamW.
        classifier_learning_rate: of the linear layer; None takes `learning_rate`, the encoder's.
        warmup_epochs: epochs in which the rates rise linearly, before they fall to 0 as half a cosine; None keeps the
            rates constant.
        augmentation: none; a crop and a mirror image; or torchvision's RandAugment with its own defaults.
    """

    epochs: int
    batch_size: int
    optimizer: Literal["sgd", "nesterov", "adamw"]
    learning_rate: float
    classifier_learning_rate: float | None = None
    weight_decay: float = 0.0
    warmup_epochs: int | None = None
    augmentation: Augmentation = "none"


PROTOCOLS = {
    # Hetero-SSFL, appendix B; batches of 256 up to 1 % of the labels. The paper names no loss, augmentation, weight
    # decay or learning-rate decay; there is none of the last three.
    "hetero_ssfl": FineTuning(100, 512, "nesterov", 0.05),
    # FedU2's released code, semi_eval.py; the paper gives no values. Deviations: the code scores the test images after
    # 100 and 200 epochs and prints the higher score, which chooses by the test images; here the score after the last
    # epoch counts. The code does not normalise images; here they are normalised as in training.
    "fedu2": FineTuning(200, 128, "sgd", 1e-3, classifier_learning_rate=0.3, augmentation="crop_and_flip"),
    # LW-FedSSL, section 4.1, for all labels, as in `fine_tuned_scores`; for a part of them this is our own use
    "lw_fedssl": FineTuning(40, 256, "adamw", 1e-3, weight_decay=1e-5, warmup_epochs=10, augmentation="rand_augment"),
}


class SemiSupervisedOptions(Options):
    """A protocol of fine-tuning on a part of the labels, and the values that replace its own."""

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
        tuning = self.tuning()
        if tuning.warmup_epochs is not None and tuning.warmup_epochs >= tuning.epochs:
            raise ValueError(
                f"warmup_epochs must be below epochs, {tuning.epochs}, got {tuning.warmup_epochs} with the protocol "
                f"{self.name}"
            )
        return self

    def tuning(self, fraction: float = 1.0) -> FineTuning:
        """Return the named protocol for a labelled fraction, with the values that are set in its place."""
        protocol = PROTOCOLS[self.name]
        if self.name == "hetero_ssfl" and fraction <= 0.01:
            protocol = protocol._replace(batch_size=256)
        return protocol._replace(**self.model_dump(include=set(protocol._fields), exclude_none=True))


class FineTuneOptions(SemiSupervisedOptions):
    """The same for all labels, by default with the protocol of the LW-FedSSL paper, section 4.1.

    For MedMNIST the paper fine-tunes on the validation split (section 4.8).
    """

    name: Literal["hetero_ssfl", "fedu2", "lw_fedssl"] = Field(
        "lw_fedssl", description="the paper whose protocol is followed; it gives each value that is not set"
    )
    images: Literal["train", "validation"] = Field("train", description="split whose labelled images are trained on")


def fine_tuned_scores(encoder: nn.Module, dataset: Dataset, options: FineTuneOptions, seed: int) -> dict[str, float]:
    """Return the test scores of a copy of the encoder fine-tuned on all labels of the training or validation images.

    The protocol is that of the LW-FedSSL paper, section 4.1: a linear layer on the encoder, both trained by AdamW with
    a warm-up and a cosine decay after it, under RandAugment. The paper leaves the following open: here the loss is
    cross-entropy, the warm-up is linear, the rate changes with every step, and images keep their size.

    The seed decides the linear layer, the order of the batches, the augmentation and any dropout. The same seed gives
    the same result; torch's global random generators are left as they were.

    Returns:
        Percentages, see `classification_scores`.

    Raises:
        UserError: fine-tuning diverged.
    """
    images, labels = dataset.train_images, dataset.train_labels
    if options.images == "validation":
        assert dataset.validation_images is not None
        assert dataset.validation_labels is not None
        images, labels = dataset.validation_images, dataset.validation_labels
    tuning, generator = options.tuning(), torch.Generator().manual_seed(seed)
    network = fine_tuned_network(encoder, images, labels, len(dataset.class_names), tuning, seed, generator)
    return classification_scores(_predicted_classes(network, dataset.test_images, tuning), dataset.test_labels)


def semi_supervised_accuracy(
    encoder: nn.Module, dataset: Dataset, fraction: float, options: SemiSupervisedOptions, seed: int
) -> float:
    """Return the test accuracy, in percent, of a copy of the encoder fine-tuned on few labels of the training images.

    The labelled part, see `labeled_subset`, is a `fraction` of each class, above 0 and at most 1. The seed decides it
    too, besides what it decides in `fine_tuned_scores`. A UserError is raised if fine-tuning diverged.
    """
    tuning, generator = options.tuning(fraction), torch.Generator().manual_seed(seed)
    rows = labeled_subset(dataset.train_labels, fraction, generator)
    images, labels = dataset.train_images[rows], dataset.train_labels[rows]
    network = fine_tuned_network(encoder, images, labels, len(dataset.class_names), tuning, seed, generator)
    predicted = _predicted_classes(network, dataset.test_images, tuning)
    return 100.0 * int((predicted == dataset.test_labels.cpu()).sum()) / len(predicted)


def labeled_subset(labels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Return the samples whose labels may be used, as ascending int64 indices into `labels` [n], on the CPU.

    From a class with c samples, max(1, round(fraction * c)) are drawn without replacement; halves are rounded up.
    With classes of equal size, such as CIFAR's, this is the class-balanced subset of the literature.
    """
    labels = labels.cpu()
    chosen = []
    for label in labels.unique():
        members = (labels == label).nonzero().squeeze(1)
        count = max(1, int(fraction * len(members) + 0.5))
        chosen.append(members[torch.randperm(len(members), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


def _predicted_classes(network: nn.Module, images: Images, tuning: FineTuning) -> Tensor:
    """Return the classes, int64 [m], that a fine-tuned network predicts for uint8 images [m, C, H, W]."""
    logits = extract_outputs(network, images)
    if not torch.isfinite(logits).all():
        largest_rate = max(tuning.learning_rate, tuning.classifier_learning_rate or 0.0)
        raise UserError(f"learning_rate: fine-tuning diverged at {largest_rate}; choose a lower one")
    return logits.argmax(dim=1)


def fine_tuned_network(
    encoder: nn.Module,
    images: Images,
    labels: Tensor,
    classes: int,
    tuning: FineTuning,
    seed: int,
    generator: torch.Generator,
) -> nn.Module:
    """Return a trained copy of the encoder with a linear layer on top, on the encoder's device.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d]. It is not changed itself.
        images: uint8 [n, C, H, W].
        labels: int64 [n], 0 to classes - 1.
        seed: decides the linear layer, what is drawn for the images, and any dropout; torch's global random generators
            are left as they were.
        generator: on the CPU; decides the order of the batches.
    """
    device = device_of(encoder)
    prepare = _preparation(tuning.augmentation, seed, device)
    tuned = merged(copy.deepcopy(encoder)).requires_grad_(True)
    with generators_set_to(seed), torch.enable_grad():
        classifier = nn.Linear(extract_features(tuned, images[:1]).shape[1], classes)
        network = nn.Sequential(tuned, classifier).to(device)
        optimizer = _optimizer(tuned, classifier, tuning)
        steps = math.ceil(len(images) / tuning.batch_size)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, steps, tuning.epochs, tuning.warmup_epochs)
        )
        for epoch in range(tuning.epochs):
            for batch in torch.randperm(len(images), generator=generator).split(tuning.batch_size):
                # BatchNorm refuses the statistics of one image, which mean nothing: use the running ones.
                network.train(len(batch) > 1)
                prepared = prepare(images[batch].to(device), batch, epoch)
                loss = F.cross_entropy(network(prepared), labels[batch].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
    return network


def _preparation(
    augmentation: Augmentation, seed: int, device: torch.device
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """From uint8 images [n, C, H, W] on the device, their row numbers [n] and the epoch to normalised float32 ones."""
    if augmentation == "crop_and_flip":
        key = ViewKey(seed_for(seed, "fine-tuning", "views"))
        draw = partial(draw_views, CROP_AND_FLIP, device=device, count=1)
        return lambda images, rows, epoch: draw(images, rows, key._replace(epoch=epoch))[0]
    if augmentation == "rand_augment":
        from torchvision.transforms import RandAugment  # here, as importing it takes a second

        one = RandAugment()  # which gives a batch one set of operations
        return lambda images, rows, epoch: normalize(torch.stack([one(image) for image in images]))
    return lambda images, rows, epoch: normalize(images)


def _optimizer(encoder: nn.Module, classifier: nn.Module, tuning: FineTuning) -> torch.optim.Optimizer:
    rate = tuning.learning_rate
    groups = [
        {"params": list(encoder.parameters()), "lr": rate},
        {"params": list(classifier.parameters()), "lr": tuning.classifier_learning_rate or rate},
    ]
    if tuning.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=tuning.weight_decay)
    nesterov = tuning.optimizer == "nesterov"
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=nesterov, weight_decay=tuning.weight_decay)


def learning_rate_factor(step: int, steps_per_epoch: int, epochs: int, warmup_epochs: int | None) -> float:
    """Return the factor of the learning rate at a step (from 0): 1 without a warm-up.

    With a warm-up it rises linearly to 1, then falls to 0 by half a cosine. It is 1 at the last step of the warm-up and
    at the next one, and would be 0 one step after the last.
    """
    if warmup_epochs is None:
        return 1.0
    warmup, total = warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def classification_scores(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the accuracy, and per-class scores averaged over the classes (macro), by scikit-learn; all in percent.

    `per_class_accuracy` is the mean of the classes' own accuracies, the LW-FedSSL paper's figure for Caltech-101 and
    MedMNIST, and by definition the same number as macro `recall`; both names are in use. Means are over the classes
    that have test images. A class that is never predicted has precision 0.
    """
    from sklearn.metrics import precision_recall_fscore_support  # here, as importing it takes a second

    true_classes, predicted_classes = labels.cpu().numpy(), predicted.cpu().numpy()
    classes = labels.unique().tolist()
    precision, recall, f1, _ = precision_recall_fscore_support(
        true_classes, predicted_classes, labels=classes, average="macro", zero_division=0.0
    )
    accuracy = (true_classes == predicted_classes).mean()
    scores = {"accuracy": accuracy, "per_class_accuracy": recall, "precision": precision, "recall": recall, "f1": f1}
    return {name: 100.0 * float(value) for name, value in scores.items()}
