"""Semi-supervised evaluation: encoder and linear layer fine-tuned on a small labelled part of the data."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..options import Options
from .features import check_features, check_images, check_labels, device_of, extract_features

_MOMENTUM = 0.9


class SemiSupervisedOptions(Options):
    """How the encoder is fine-tuned; the defaults are those of the Hetero-SSFL paper, appendix B.

    `batch_size` None is the paper's: 256 where at most 1 % is labelled, 512 above.
    """

    fraction: float = Field(default=0.1, gt=0, le=1)
    epochs: int = Field(default=100, ge=1)
    learning_rate: float = Field(default=0.05, gt=0)
    batch_size: int | None = Field(default=None, ge=1)


def semi_supervised_accuracy(
    encoder: nn.Module,
    train_images: Tensor,
    train_labels: Tensor,
    test_images: Tensor,
    test_labels: Tensor,
    classes: int,
    options: SemiSupervisedOptions,
    seed: int,
    device: torch.device | str | None = None,
) -> float:
    """Test accuracy, in percent, of a copy of the encoder fine-tuned with a linear layer on few labels.

    The protocol of Hetero-SSFL, appendix B: 1 % or 10 % of the labels, encoder and linear layer trained for
    100 epochs by SGD with Nesterov momentum 0.9 and learning rate 0.05, batches of 256 or 512. The paper
    names no loss, augmentation, weight decay or learning-rate decay; here the loss is cross-entropy, and
    there is none of the others. In a batch of one image, BatchNorm uses its running statistics.

    Args:
        encoder: maps normalised images, float32 [b, C, H, W], to representations [b, d]. It is copied, and
            not changed itself.
        train_images: uint8 [n, C, H, W]; the labelled part is drawn from them by `labeled_subset`.
        train_labels: integer [n], 0 to classes - 1.
        test_images: uint8 [m, C, H, W].
        test_labels: integer [m], 0 to classes - 1.
        classes: number of outputs of the linear layer.
        options: labelled fraction, epochs, learning rate and batch size.
        seed: decides the labelled part, the linear layer, the order of the batches and any dropout. The same
            seed gives the same result; torch's global random generators are left as they were.
        device: where to compute. None: where the encoder is.

    Returns:
        Percentage of the m test images that are classified right, 0 to 100.

    Raises:
        UserError: images or labels that do not fit, or training diverged.
    """
    from ..data.augmentation import normalize

    check_images("train_images", train_images)
    check_images("test_images", test_images)
    check_labels("train_labels", train_labels, len(train_images), classes)
    check_labels("test_labels", test_labels, len(test_images), classes)

    device = device_of(encoder) if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    labeled = labeled_subset(train_labels, options.fraction, generator).to(train_images.device)
    images = train_images[labeled].to(device)
    labels = train_labels.to(train_images.device)[labeled].to(device, torch.int64)
    batch_size = options.batch_size or (256 if options.fraction <= 0.01 else 512)

    tuned = copy.deepcopy(encoder).requires_grad_(True)
    with own_global_generators(seed, device), torch.enable_grad():
        width = extract_features(tuned, images[:1], device=device).shape[1]
        network = nn.Sequential(tuned, nn.Linear(width, classes)).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=options.learning_rate, momentum=_MOMENTUM, nesterov=True)
        for _ in range(options.epochs):
            order = torch.randperm(len(images), generator=generator).to(device)
            for batch in order.split(batch_size):
                # The statistics of one image mean nothing, and BatchNorm refuses them: use the running ones.
                network.train(len(batch) > 1)
                loss = F.cross_entropy(network(normalize(images[batch])), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    logits = extract_features(network, test_images, device=device)
    try:
        check_features("logits", logits)
    except UserError as error:
        raise UserError(
            f"learning_rate: fine-tuning diverged at {options.learning_rate}; choose a lower one"
        ) from error
    return 100.0 * int((logits.argmax(dim=1) == test_labels.cpu()).sum()) / len(test_images)


def labeled_subset(labels: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Draw the samples whose labels may be used: the same fraction of every class, at least one of each.

    Of a class with c samples max(1, round(fraction * c)) are drawn without replacement, halves rounded up. On
    classes of equal size, those of CIFAR, this is the class-balanced subset of the literature.

    Args:
        labels: integer [n].
        fraction: above 0 and at most 1.
        generator: on the CPU; the only source of randomness.

    Returns:
        int64 indices into `labels`, ascending, on the CPU.

    Raises:
        UserError: `fraction` is out of range.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction: expected above 0 and at most 1, got {fraction}")
    labels = labels.cpu()
    chosen = []
    for label in labels.unique():
        members = (labels == label).nonzero().squeeze(1)
        count = max(1, int(fraction * len(members) + 0.5))
        chosen.append(members[torch.randperm(len(members), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


@contextmanager
def own_global_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators (linear layer, dropout) inside the block and put them back after it."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        # Not torch.manual_seed, which would also seed the other devices and so not be undone.
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
