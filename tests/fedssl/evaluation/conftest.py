"""A small encoder, images whose class can be seen, and points whose class can be guessed."""

import pytest
import torch
from torch import nn


class TinyEncoder(nn.Module):
    """A linear map, BatchNorm and dropout: fails on one image in training mode, and draws random numbers."""

    def __init__(self, pixels=16, num_features=8):
        super().__init__()
        self.num_features = num_features
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, num_features), nn.BatchNorm1d(num_features), nn.Dropout(0.1)
        )

    def forward(self, images):
        return self.layers(images)


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
def encoder() -> TinyEncoder:
    torch.manual_seed(0)
    return TinyEncoder()
