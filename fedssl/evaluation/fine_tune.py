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
from .classification import classification_scores
from .features import check_features, device_of, extract_features
from .semi_supervised import own_global_generators


class FineTuneOptions(Options):
    """How the encoder is fine-tuned; the defaults are those of the LW-FedSSL paper, section 4.1.

    images: which labelled images; the paper takes MedMNIST's validation split (section 4.8), else the training images
        of the downstream data.
    """

    images: Literal["train", "validation"] = "train"
    epochs: int = Field(default=40, ge=1)
    warmup_epochs: int = Field(default=10, ge=0)
    batch_size: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=1e-5, ge=0)
    rand_augment: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> "FineTuneOptions":
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs must be below epochs, {self.epochs}, came {self.warmup_epochs}")
        return self


def check_fine_tuning(options: FineTuneOptions | None, dataset: Dataset) -> None:
    """Refuse to fine-tune on a validation split that the data do not have (UserError)."""
    if options is not None and options.images == "validation" and dataset.validation_images is None:
        raise UserError(
            "evaluation.fine_tune.images is validation, but the data have no validation split: use train, or an .npz "
            "file with x_val and y_val (MedMNIST: val_images and val_labels)"
        )


def learning_rate_factor(step: int, steps_per_epoch: int, options: FineTuneOptions) -> float:
    """What the learning rate is multiplied with at a step, from 0: a line up to 1, then half a cosine down to 0.

    The line reaches 1 with the last step of the warm-up; the cosine is 1 at the step after it and would be 0 one step
    after the last.
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

    The protocol of the LW-FedSSL paper, section 4.1: a linear head on the encoder, both trained for 40 epochs by AdamW
    (learning rate 1e-3, weight decay 1e-5, batches of 256) with 10 epochs of warm-up and a cosine decay after it,
    under torchvision's RandAugment with its own defaults. What the paper leaves open: the loss is cross-entropy, the
    warm-up a line, and the rate changes with every step. Images keep their size.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d]. It is copied, and not
            changed itself.
        dataset: the test images, and the labelled ones that `options.images` names.
        options: see `FineTuneOptions`.
        seed: decides the linear layer, the order of the batches, the augmentation and any dropout. The same seed gives
            the same result; torch's global random generators are left as they were.
        device: where to compute. None: where the encoder is.

    Returns:
        See `classification_scores`.

    Raises:
        UserError: there is no validation split where it is asked for, or training diverged.
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
    with own_global_generators(seed, device), torch.enable_grad():
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
                if options.rand_augment:  # one by one: a call draws one set of operations
                    views = torch.stack([augment(image) for image in views])
                # The statistics of one image mean nothing, and BatchNorm refuses them: use the running ones.
                network.train(len(batch) > 1)
                loss = F.cross_entropy(network(normalize(views).to(device)), labels[batch].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
    logits = extract_features(network, dataset.test_images, device=device)
    try:
        check_features("logits", logits)
    except UserError as error:
        raise UserError(
            f"learning_rate: fine-tuning diverged at {options.learning_rate}; choose a lower one"
        ) from error
    return classification_scores(logits.argmax(dim=1), dataset.test_labels)
