"""How many training images of which class and shape a table's runs have, known before the images are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data.datasets import Dataset, load_dataset
from ..data.dealing import deal
from ..data.file_listing import subfolders
from ..data.options import DataOptions
from ..data.outline import outline
from ..data.paths import expanded, kind_of
from ..recipe import Recipe
from ..rules import check_shares
from .table import ExpectedData

#: the published sizes of the data sets that torchvision downloads: training images, classes, shape
_PUBLISHED = {
    "cifar10": ExpectedData(images=50_000, classes=10, shape=(3, 32, 32)),
    "cifar100": ExpectedData(images=50_000, classes=100, shape=(3, 32, 32)),
    "fashion_mnist": ExpectedData(images=60_000, classes=10, shape=(1, 28, 28)),
}


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The training images of a run, without their pixels.

    Attributes:
        labels: int64 [n], as the runs have them; for data that is not read, classes of equal size.
        classes: number of classes; 1 without labels.
        shape: channels, height and width.
    """

    labels: Tensor
    classes: int
    shape: tuple[int, int, int]

    def client_sizes(self, recipe: Recipe) -> list[int]:
        """How many images each client gets.

        Raises:
            UserError: the images cannot be divided as the recipe asks, or a client has fewer than a batch.
        """
        no_pixels = torch.zeros((), dtype=torch.uint8).expand(len(self.labels), *self.shape)
        names = tuple(map(str, range(self.classes))) if self.classes > 1 else ()
        images = Dataset(recipe.data.name, no_pixels, self.labels, no_pixels[:0], self.labels[:0], names, None)
        client_rows = deal(images, recipe.partition, recipe.seed)
        check_shares(recipe, client_rows, None)
        return [len(rows) for rows in client_rows]


def training_data(options: DataOptions, seed: int, expected: ExpectedData | None) -> TrainingData | None:
    """The training images that `options` name.

    Digits and .npz files are read. The sizes of torchvision's data sets are known, and image files are counted and not
    opened, so that all their images are taken to be usable and their classes equally large.

    Args:
        options: a recipe's; the public images need not be there.
        seed: the run's.
        expected: what missing data will hold.

    Returns:
        None where the data is missing and nothing is expected of it.

    Raises:
        UserError: data that is there and cannot be read.
    """
    known = _PUBLISHED.get(options.name)
    if known is None and is_missing(options.path, "data.path"):
        known = expected
        if known is None:
            return None
    if known is None and options.name in ("digits", "npz"):
        images = load_dataset(options.model_copy(update={"public_path": None}), seed)
        channels, height, width = images.train_images.shape[1:]
        return TrainingData(images.train_labels, max(1, len(images.class_names)), (channels, height, width))
    if known is None:
        known = _counted_files(options)
    shape = known.shape if options.image_size is None else (known.shape[0], options.image_size, options.image_size)
    count = known.images - options.public_holdout
    count = count if options.train_limit is None else min(count, options.train_limit)
    return TrainingData(torch.arange(max(0, count)) % known.classes, known.classes, shape)


def is_missing(path: Path | None, option: str) -> bool:
    """Whether an option names a file or folder that does not exist."""
    return path is not None and kind_of(expanded(path, option)) == "missing"


def _counted_files(options: DataOptions) -> ExpectedData:
    assert options.path is not None
    seen = outline(options.model_dump(mode="json"))
    assert seen is not None
    folder = expanded(options.path, "data.path")
    by_folder = options.name == "folder" or options.labels == "folders"
    inner = folder / "train" if (folder / "train").is_dir() else folder
    classes = len(subfolders(inner)) if by_folder else 1
    return ExpectedData(
        images=max(1, seen.images), classes=max(1, classes), shape=(seen.channels, seen.side, seen.side)
    )
