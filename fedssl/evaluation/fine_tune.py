"""Fine-tuning: encoder and linear layer trained on labels, with warm-up, cosine decay and RandAugment."""

import copy
import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.nn import functional as F

from ..data.augmentation import normalize
from ..data.datasets import Dataset
from ..errors import UserError
from ..options import Options
from ..randomness import seeded_on
from .classification import classification_scores
from .features import device_of, extract_features
from .semi_supervised import predict_classes


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


def check_fine_tuning(options: FineTuneOptions | None, dataset: Dataset) -> None:
    """Raise a UserError where the fine-tuning needs a validation split that the data do not have."""
    if options is not None and options.images == "validation" and dataset.validation_images is None:
        raise UserError(
            "evaluation.fine_tune.images is validation, but the data have no validation split: use train, or an .npz "
            "file with x_val and y_val (in MedMNIST val_images and val_labels)"
        )


def learning_rate_factor(step: int, steps_per_epoch: int, options: FineTuneOptions) -> float:
    """The factor of the learning rate at a step (from 0): it rises linearly to 1, then falls to 0 by half a cosine.

    It is 1 at the last step of the warm-up and at the next one, and would be 0 one step after the last.
    """
    warmup, total = options.warmup_epochs * steps_per_epoch, options.epochs * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup)))


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
    from torchvision.transforms import RandAugment

    check_fine_tuning(options, dataset)
    images, labels = dataset.train_images, dataset.train_labels
    if options.images == "validation":
        assert dataset.validation_images is not None
        assert dataset.validation_labels is not None
        images, labels = dataset.validation_images, dataset.validation_labels
    device = device_of(encoder) if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    tuned = copy.deepcopy(encoder).requires_grad_(True)
    augment = RandAugment()
    with seeded_on(device, seed), torch.enable_grad():
        width = extract_features(tuned, images[:1], device=device).shape[1]
        network = nn.Sequential(tuned, nn.Linear(width, len(dataset.class_names))).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
        steps = -(-len(images) // options.batch_size)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, steps, options)
        )
        for _ in range(options.epochs):
            for batch in torch.randperm(len(images), generator=generator).split(options.batch_size):
                views = images[batch]
                if options.rand_augment:  # one by one, as a call draws one set of operations
                    views = torch.stack([augment(image) for image in views])
                # BatchNorm refuses the statistics of one image, which mean nothing: use the running ones.
                network.train(len(batch) > 1)
                loss = F.cross_entropy(network(normalize(views).to(device)), labels[batch].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
    predicted = predict_classes(network, dataset.test_images, options.learning_rate, device)
    return classification_scores(predicted, dataset.test_labels)
