"""Semi-supervised evaluation: encoder and linear layer fine-tuned on a small labelled part of the data."""

import copy

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.augmentation import normalize
from ..data.stored_images import Images
from ..errors import UserError
from ..options import Options
from ..randomness import seeded_on
from .features import device_of, extract_features, extract_outputs

_MOMENTUM = 0.9


class SemiSupervisedOptions(Options):
    """How the encoder is fine-tuned; the defaults are those of the Hetero-SSFL paper, appendix B."""

    fraction: float = Field(0.1, gt=0, le=1, description="share of each class whose labels are used")
    epochs: int = Field(100, ge=1, description="passes over the labelled images")
    learning_rate: float = Field(0.05, gt=0, description="of SGD with Nesterov momentum 0.9")
    batch_size: int | None = Field(
        None,
        ge=1,
        description="labelled images a step (default: the paper's 256 up to a fraction of 0.01, 512 above)",
    )


def semi_supervised_accuracy(
    encoder: nn.Module,
    train_images: Images,
    train_labels: Tensor,
    test_images: Images,
    test_labels: Tensor,
    classes: int,
    options: SemiSupervisedOptions,
    seed: int,
    device: torch.device | str | None = None,
) -> float:
    """Test accuracy, in percent, of a copy of the encoder fine-tuned with a linear layer on few labels.

    The protocol is that of Hetero-SSFL, appendix B: on 1 % or 10 % of the labels, encoder and linear layer are
    trained for 100 epochs by SGD with Nesterov momentum 0.9, learning rate 0.05 and batches of 256 or 512. The
    paper names no loss, augmentation, weight decay or learning-rate decay. Here the loss is cross-entropy, and
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
        device: where to compute (default: where the encoder is).

    Returns:
        Percentage of the m test images that are classified correctly, 0 to 100.

    Raises:
        UserError: fine-tuning diverged.
    """
    device = device_of(encoder) if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    labeled = labeled_subset(train_labels, options.fraction, generator).to(train_images.device)
    images = train_images[labeled].to(device)
    labels = train_labels.to(train_images.device)[labeled].to(device, torch.int64)
    batch_size = options.batch_size or (256 if options.fraction <= 0.01 else 512)

    tuned = copy.deepcopy(encoder).requires_grad_(True)
    with seeded_on(device, seed), torch.enable_grad():
        width = extract_features(tuned, images[:1], device=device).shape[1]
        network = nn.Sequential(tuned, nn.Linear(width, classes)).to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=options.learning_rate, momentum=_MOMENTUM, nesterov=True)
        for _ in range(options.epochs):
            order = torch.randperm(len(images), generator=generator).to(device)
            for batch in order.split(batch_size):
                # BatchNorm refuses the statistics of one image, which mean nothing: use the running ones.
                network.train(len(batch) > 1)
                loss = F.cross_entropy(network(normalize(images[batch])), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    predicted = predict_classes(network, test_images, options.learning_rate, device)
    return 100.0 * int((predicted == test_labels.cpu()).sum()) / len(test_images)


def predict_classes(network: nn.Module, images: Images, learning_rate: float, device: torch.device) -> Tensor:
    """The classes, int64 [n], that a fine-tuned network gives uint8 `images` [n, C, H, W].

    Raises:
        UserError: the outputs are not finite, so fine-tuning with `learning_rate` diverged.
    """
    logits = extract_outputs(network, images, device)
    if not torch.isfinite(logits).all():
        raise UserError(f"learning_rate: fine-tuning diverged at {learning_rate}; choose a lower one")
    return logits.argmax(dim=1)


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
