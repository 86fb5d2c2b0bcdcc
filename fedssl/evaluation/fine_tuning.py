"""Training a copy of an encoder together with a linear layer on labelled images, the loop of every fine-tuning."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkernels import ViewKey

from ..augmentations.base import draw_views
from ..augmentations.random_views import RandomViews
from ..data.pixels import normalize
from ..data.stored_images import Images
from ..errors import UserError
from ..randomness import seed_for, seeded_on
from .features import extract_features, extract_outputs

Augmentation = Literal["none", "crop_and_flip", "rand_augment"]

_MOMENTUM = 0.9
#: FedU2's released code (semi_eval.py): a square of 0.64 to 1 of the area, and a mirror image in half of the cases
_CROP_AND_FLIP = RandomViews(
    crop_scale=(0.64, 1.0), crop_ratio=(1.0, 1.0), flip=0.5, jitter_probability=0.0, grayscale=0.0, blur=0.0
)


@dataclass(frozen=True)
class FineTuning:
    """How an encoder and a linear layer are trained together; the loss is cross-entropy.

    Attributes:
        epochs: passes over the labelled images.
        batch_size: images a step.
        optimizer: SGD with momentum 0.9, the same with Nesterov's momentum, or AdamW.
        learning_rate: of the encoder.
        classifier_learning_rate: of the linear layer; None takes that of the encoder.
        weight_decay: of all weights.
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


def fine_tuned_network(
    encoder: nn.Module,
    images: Images,
    labels: Tensor,
    classes: int,
    tuning: FineTuning,
    seed: int,
    generator: torch.Generator,
    device: torch.device,
) -> nn.Module:
    """A trained copy of the encoder with a linear layer on top.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d]. It is copied, and not
            changed itself.
        images: uint8 [n, C, H, W].
        labels: int64 [n], 0 to classes - 1.
        classes: number of outputs of the linear layer.
        tuning: see `FineTuning`.
        seed: decides the linear layer, what is drawn for the images, and any dropout; torch's global random generators
            are left as they were.
        generator: on the CPU; decides the order of the batches.
        device: where to compute.
    """
    prepare = _preparation(tuning.augmentation, seed, device)
    tuned = copy.deepcopy(encoder).requires_grad_(True)
    with seeded_on(device, seed), torch.enable_grad():
        width = extract_features(tuned, images[:1], device=device).shape[1]
        classifier = nn.Linear(width, classes)
        network = nn.Sequential(tuned, classifier).to(device)
        optimizer = _optimizer(tuned, classifier, tuning)
        steps = -(-len(images) // tuning.batch_size)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_factor(step, steps, tuning))
        for epoch in range(tuning.epochs):
            for batch in torch.randperm(len(images), generator=generator).split(tuning.batch_size):
                # BatchNorm refuses the statistics of one image, which mean nothing: use the running ones.
                network.train(len(batch) > 1)
                prepared = prepare(images[batch], batch, epoch).to(device)
                loss = F.cross_entropy(network(prepared), labels[batch].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
    return network


def learning_rate_factor(step: int, steps_per_epoch: int, epochs: int, warmup_epochs: int) -> float:
    """The factor of the learning rate at a step (from 0): it rises linearly to 1, then falls to 0 by half a cosine.

    It is 1 at the last step of the warm-up and at the next one, and would be 0 one step after the last.
    """
    warmup, total = warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def predict_classes(network: nn.Module, images: Images, learning_rate: float, device: torch.device) -> Tensor:
    """The classes, int64 [n], that a fine-tuned network gives uint8 `images` [n, C, H, W].

    Raises:
        UserError: the outputs are not finite, so fine-tuning with `learning_rate` diverged.
    """
    logits = extract_outputs(network, images, device)
    if not torch.isfinite(logits).all():
        raise UserError(f"learning_rate: fine-tuning diverged at {learning_rate}; choose a lower one")
    return logits.argmax(dim=1)


def _rate_factor(step: int, steps_per_epoch: int, tuning: FineTuning) -> float:
    if tuning.warmup_epochs is None:
        return 1.0
    return learning_rate_factor(step, steps_per_epoch, tuning.epochs, tuning.warmup_epochs)


def _optimizer(encoder: nn.Module, classifier: nn.Module, tuning: FineTuning) -> torch.optim.Optimizer:
    rate = tuning.learning_rate
    groups = [
        {"params": list(encoder.parameters()), "lr": rate},
        {"params": list(classifier.parameters()), "lr": tuning.classifier_learning_rate or rate},
    ]
    if tuning.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, weight_decay=tuning.weight_decay)
    nesterov = tuning.optimizer == "nesterov"
    return torch.optim.SGD(groups, lr=rate, momentum=_MOMENTUM, nesterov=nesterov, weight_decay=tuning.weight_decay)


def _preparation(
    augmentation: Augmentation, seed: int, device: torch.device
) -> Callable[[Tensor, Tensor, int], Tensor]:
    """From uint8 images [n, C, H, W], their row numbers [n] and the epoch to normalised float32 [n, C, H, W]."""
    if augmentation == "crop_and_flip":
        key = ViewKey(seed_for(seed, "fine-tuning", "views"))

        def crop_and_flip(images: Tensor, rows: Tensor, epoch: int) -> Tensor:
            return draw_views(_CROP_AND_FLIP, images, rows, key._replace(epoch=epoch), device, count=1)[0]

        return crop_and_flip
    if augmentation == "rand_augment":
        from torchvision.transforms import RandAugment

        rand_augment = RandAugment()
        # One by one, as a call draws one set of operations.
        return lambda images, rows, epoch: normalize(torch.stack([rand_augment(image) for image in images]))
    return lambda images, rows, epoch: normalize(images)
