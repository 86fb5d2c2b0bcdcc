"""Splits: the training, test and validation images that every kind of data is read into."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .pixels import Window
from .stored_images import Images, images_of_rows


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One split, as `Dataset` describes it."""

    images: Images
    labels: Tensor
    targets: Tensor | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rows(self, index: Tensor) -> "LabelledImages":
        """Return the images and labels with the given row numbers, int64 [m]."""
        numbers = index.tolist()
        columns = {name: tuple(values[number] for number in numbers) for name, values in self.columns.items()}
        targets = None if self.targets is None else self.targets[index]
        return LabelledImages(images_of_rows(self.images, index), self.labels[index], targets, columns)


@dataclass(frozen=True, eq=False)
class Splits:
    """One dataset's splits, its classes and its window, as `Dataset` describes them."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    validation: LabelledImages | None = None
    window: Window | None = None


def unlabelled(images: Images, targets: Tensor | None = None) -> LabelledImages:
    """Return a split of images without classes."""
    return LabelledImages(images, torch.zeros(len(images), dtype=torch.int64), targets)
