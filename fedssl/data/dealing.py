"""Which client holds which of a dataset's training images: by a partition, or by a column of the images' table."""

import torch
from torch import Tensor

from ..errors import UserError
from .datasets import Dataset
from .error_text import listed, printable
from .partitions import PartitionOptions, partition_indices

_DEALT_BY_CLASS = ("disjoint_classes", "dirichlet", "dirichlet_equal")


def deal(dataset: Dataset, options: PartitionOptions, seed: int) -> list[Tensor]:
    """Divide a dataset's training images, see `partition_indices`; `column` gives each client the rows of one value.

    Returns:
        One sorted int64 tensor of row numbers a client.

    Raises:
        UserError: the request cannot be met: it needs labels or a column that the images do not have, for instance.
    """
    if options.name == "column":
        return _by_column(dataset, options)
    if options.name in _DEALT_BY_CLASS and not dataset.labelled:
        labels = "no labels" if dataset.train_targets is None else "several labels each"
        raise UserError(
            f"partition.name={options.name} divides the classes, and the images of data.name={dataset.name} have "
            f"{labels}: set partition='{{name: iid, clients: {options.clients}}}', or quantity_skew or column in place "
            "of iid"
        )
    return partition_indices(dataset.train_labels, options, seed)


def _by_column(dataset: Dataset, options: PartitionOptions) -> list[Tensor]:
    assert options.column is not None
    values = dataset.columns.get(options.column)
    if values is None:
        which = f"its columns are {listed(list(dataset.columns))}" if dataset.columns else "there is no table"
        raise UserError(
            f"partition.column={printable(options.column)} is no column of the images' table: {which}; set "
            "data.name=images and data.labels to a CSV file with that column"
        )
    names = sorted(set(values))
    if len(names) != options.clients:
        raise UserError(
            f"the column {printable(options.column)} has {len(names)} values ({listed(names)}), but "
            f"partition.clients is {options.clients}; set partition.clients={len(names)}, one client a value"
        )
    number_of = {name: number for number, name in enumerate(names)}
    owners = torch.tensor([number_of[value] for value in values])
    rows = [(owners == client).nonzero()[:, 0] for client in range(len(names))]
    smallest = min(range(len(rows)), key=lambda client: len(rows[client]))
    if len(rows[smallest]) < options.min_samples:
        raise UserError(
            f"client {smallest} ({options.column} {printable(names[smallest])}) has {len(rows[smallest])} images, "
            f"fewer than partition.min_samples={options.min_samples}; lower it, or use more data"
        )
    return rows
