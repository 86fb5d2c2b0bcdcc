"""A small encoder, images whose class can be seen, and points whose class can be guessed."""

import pytest
import torch
from torch import nn


def tiny_encoder() -> nn.Sequential:
    """For images of 16 pixels: fails on one image in training mode, and draws random numbers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))


def bright_quarters(count, seed=0, noise=60):
    """uint8 [count, 1, 4, 4] and labels: the class is the quarter of the image that is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    images = torch.randint(0, 100 + noise, (count, 1, 4, 4), generator=generator)
    for index, label in enumerate(labels.tolist()):
        row, column = divmod(label, 2)
        images[index, 0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += 95
    return images.to(torch.uint8), labels


def blobs(train, test, dimension, classes=4, noise=1.0, seed=0, dtype=torch.float32):
    """Points around the centres of their classes, and labels, of training and of test."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dimension, generator=generator, dtype=dtype)
    labels = torch.randint(classes, (train + test,), generator=generator)
    points = centres[labels] + noise * torch.randn(train + test, dimension, generator=generator, dtype=dtype)
    return points[:train], labels[:train], points[train:], labels[train:]


@pytest.fixture
def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return tiny_encoder()
