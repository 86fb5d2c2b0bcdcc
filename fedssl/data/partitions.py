"""Partitions: the division of the training samples amongst the clients, and tables of it."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import UserError
from ..options import Options
from ..untrusted import printable
from .datasets import Dataset
from .files import composed, listed

_MOST_DRAWS = 1000
#: the kinds of partition that read an option
_READ_BY = {
    "classes_per_client": ["disjoint_classes"],
    "column": ["column"],
    "alpha": ["dirichlet", "dirichlet_equal", "quantity_skew"],
}

_Counts = NDArray[np.int64]


class PartitionOptions(Options):
    """Options of the division of the samples. Its kinds by name:

    - iid: equal random shares.
    - disjoint_classes: whole classes (Hetero-SSFL, section 5.1).
    - dirichlet: each class is divided by its own draw from Dirichlet(alpha) (Yurochkin et al. 2019); sizes differ too.
    - dirichlet_equal: equal sizes; each client draws its shares of the classes from Dirichlet(alpha) (Hsu et al. 2019).
    - quantity_skew: the clients' sizes are drawn from Dirichlet(alpha), and the classes are mixed (Li et al. 2022).
    - column: each client gets the images of one value of a column of their table, in the values' alphabetical order.
    - sites: nothing is divided, as every site of engine flower brings its own images.
    """

    name: Literal["iid", "disjoint_classes", "dirichlet", "dirichlet_equal", "quantity_skew", "column", "sites"] = (
        Field("disjoint_classes", description="how the training images are divided amongst the clients")
    )
    clients: int = Field(5, ge=1, description="number of clients")
    classes_per_client: int | None = Field(
        None, ge=1, description="classes of each client, for disjoint_classes (default: classes // clients)"
    )
    column: str | None = Field(
        None, description="for column: the column of the images' table (data.labels) whose values are the clients"
    )
    alpha: float = Field(
        0.5,
        gt=0,
        description="concentration of the Dirichlet distribution, for dirichlet, dirichlet_equal and quantity_skew; "
        "small values give uneven shares, large ones even shares",
    )
    min_samples: int = Field(
        2,
        ge=1,
        description="fewest images a client may have; dirichlet and quantity_skew are drawn again until it holds",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "PartitionOptions":
        if self.name == "column" and self.column is None:
            raise ValueError("name=column needs column=NAME, a column of the images' table")
        for option, kinds in _READ_BY.items():
            if self.name not in kinds and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(f"{option} is for name={' or '.join(kinds)}, not for name={self.name}; leave it out")
        return self


def deal(dataset: Dataset, options: PartitionOptions, seed: int) -> list[Tensor]:
    """Divide a dataset's training images, see `partition_indices`; `column` gives each client the rows of one value."""
    if options.name == "column":
        return _by_column(dataset, options)
    if options.name in ("disjoint_classes", "dirichlet", "dirichlet_equal") and not dataset.labelled:
        labels = "no labels" if dataset.train_targets is None else "several labels each"
        raise UserError(
            f"partition.name={options.name} divides the classes, and the images of data.name={dataset.name} have "
            f"{labels}: set partition='{{name: iid, clients: {options.clients}}}', or quantity_skew or column in place "
            "of iid"
        )
    return partition_indices(dataset.train_labels, options, seed)


def _by_column(dataset: Dataset, options: PartitionOptions) -> list[Tensor]:
    assert options.column is not None
    values = dataset.columns.get(composed(options.column))
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


def partition_indices(labels: Tensor, options: PartitionOptions, seed: int) -> list[Tensor]:
    """Divide samples with integer `labels` [n] amongst `options.clients` clients; `seed` >= 0 decides every draw.

    Returns:
        One sorted int64 tensor of row numbers a client. Every sample is on exactly one client, with `sites` on none.

    Raises:
        UserError: the request cannot be met (too few samples or classes, classes left over, a small client).
    """
    if options.name == "sites":
        return [torch.empty(0, dtype=torch.int64) for _ in range(options.clients)]
    if len(labels) < options.clients * options.min_samples:
        raise UserError(
            f"{len(labels)} samples cannot give {options.clients} clients at least {options.min_samples} each; "
            "lower partition.clients or partition.min_samples, or use more data"
        )
    generator = np.random.default_rng(seed)
    if options.name in ("iid", "quantity_skew"):
        groups = [np.arange(len(labels))]
    else:
        classes = labels.cpu().numpy()
        groups = [np.flatnonzero(classes == label) for label in np.unique(classes)]
    sizes = np.array([len(group) for group in groups])
    if options.name == "iid":
        counts = _equal_shares(sizes, np.ones((1, options.clients), bool))
    elif options.name == "disjoint_classes":
        counts = _equal_shares(sizes, _deal_classes(len(sizes), options, generator))
    elif options.name == "dirichlet_equal":
        counts = _class_prior_counts(sizes, options, generator)
    else:
        counts = _dirichlet_counts(sizes, options, generator)
    client_sizes = counts.sum(0)
    if client_sizes.min() < options.min_samples:
        raise UserError(
            f"client {int(client_sizes.argmin())} would have {int(client_sizes.min())} samples, fewer than "
            f"partition.min_samples={options.min_samples}; use fewer clients or more data"
        )
    pieces = [
        np.split(generator.permutation(group), np.cumsum(group_counts)[:-1])
        for group, group_counts in zip(groups, counts, strict=True)
    ]
    return [torch.from_numpy(np.sort(np.concatenate(client))) for client in zip(*pieces, strict=True)]


def _deal_classes(classes: int, options: PartitionOptions, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Deal the classes: return [classes, clients], True where a client holds a class, as in Hetero-SSFL, section 5.1.

    Each client in turn takes the classes that the fewest clients hold so far; ties are broken at random. So no
    client gets a class twice, all classes are held by equally many clients (within one), and no class is shared
    unless there are more places than classes.
    """
    clients = options.clients
    per_client = options.classes_per_client or classes // clients
    if per_client == 0:
        raise UserError(
            f"{clients} clients cannot have disjoint classes: the data have only {classes}; "
            f"lower partition.clients to {classes}, or set partition.classes_per_client=1 to share classes"
        )
    if per_client > classes:
        raise UserError(f"partition.classes_per_client={per_client} but the data have only {classes} classes; lower it")
    if clients * per_client < classes:
        raise UserError(
            f"{clients} clients x {per_client} classes are {clients * per_client} of {classes} classes and "
            f"leave samples over; set partition.classes_per_client={-(-classes // clients)}, or raise "
            "partition.clients"
        )
    holds = np.zeros((classes, clients), bool)
    for client in range(clients):
        least_held_first = np.lexsort((generator.random(classes), holds.sum(1)))
        holds[least_held_first[:per_client], client] = True
    return holds


def _equal_shares(sizes: _Counts, holds: NDArray[np.bool_]) -> _Counts:
    """Return counts [groups, clients]: each group divided equally (within one) amongst the clients that hold it."""
    counts = np.zeros(holds.shape, np.int64)
    for group, size in enumerate(sizes):
        holders = np.flatnonzero(holds[group])
        counts[group, holders] = [len(part) for part in np.array_split(np.arange(size), len(holders))]
    return counts


def _dirichlet_counts(sizes: _Counts, options: PartitionOptions, generator: np.random.Generator) -> _Counts:
    """Return counts [groups, clients]: each group divided by its own draw, repeated until no client is too small."""
    largest_minimum = 0
    for _ in range(_MOST_DRAWS):
        shares = generator.dirichlet(np.full(options.clients, options.alpha), size=len(sizes))
        edges = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        edges[:, -1] = sizes
        counts = np.diff(edges, axis=1, prepend=0)
        smallest = int(counts.sum(0).min())
        if smallest >= options.min_samples:
            return counts
        largest_minimum = max(largest_minimum, smallest)
    raise UserError(
        f"{options.name} with alpha={options.alpha:g}: in {_MOST_DRAWS} draws the smallest of {options.clients} "
        f"clients never had more than {largest_minimum} samples, and partition.min_samples={options.min_samples}; "
        "raise partition.alpha, or lower partition.clients or partition.min_samples"
    )


def _class_prior_counts(sizes: _Counts, options: PartitionOptions, generator: np.random.Generator) -> _Counts:
    """Return counts [groups, clients] for clients of equal size (within one), after Hsu et al. 2019, section 3.

    Each client draws its class prior from Dirichlet(alpha * C * p) with p [C] the classes' frequencies; the factor C
    makes it Dirichlet(alpha, ..., alpha) for balanced classes. The clients take turns. In each turn a client takes one
    sample from a class drawn by its prior amongst the classes that have samples left. Where its prior gives none of
    these any weight, the class is drawn by the numbers of samples left. (Hsu et al. deal no more than their clients
    need; here every sample is dealt, so the last ones fit the priors less.)
    """
    total, classes = int(sizes.sum()), len(sizes)
    priors = generator.dirichlet(options.alpha * classes * sizes / total, size=options.clients)
    left = sizes.copy()
    counts = np.zeros((classes, options.clients), np.int64)
    wanted = np.full(options.clients, total // options.clients)
    wanted[generator.permutation(options.clients)[: total % options.clients]] += 1
    for turn in range(int(wanted.max())):
        for client in generator.permutation(np.flatnonzero(wanted > turn)):
            edges = np.cumsum(priors[client] * (left > 0))
            if edges[-1] <= 0:
                edges = np.cumsum(left)
            group = int(np.searchsorted(edges, generator.random() * edges[-1], side="right"))
            left[group] -= 1
            counts[group, client] += 1
    return counts


def class_counts(labels: Tensor, indices: Sequence[Tensor], classes: int) -> Tensor:
    """Return the samples of each class on each client, int64 [clients, classes]; `labels` [n] are below `classes`."""
    return torch.stack([torch.bincount(labels[index], minlength=classes) for index in indices])


def format_partition(counts: Tensor, class_names: Sequence[str]) -> str:
    """Format `counts` [clients, classes] as a table with totals; beyond 12 classes a row names its three largest."""
    classes = len(class_names)
    rows = [(str(client), row) for client, row in enumerate(counts)] + [("total", counts.sum(0))]
    if classes <= 12:
        cells, sides = [["client", *class_names, "total"]], ">" * (classes + 2)
        cells += [[name, *map(str, row.tolist()), str(int(row.sum()))] for name, row in rows]
    else:
        cells, sides = [["client", "total", "classes", "largest classes"]], ">>><"
        for name, row in rows:
            largest = [index for index in row.argsort(descending=True, stable=True)[:3].tolist() if row[index] > 0]
            largest_classes = ", ".join(f"{class_names[index]} ({int(row[index])})" for index in largest)
            cells.append([name, str(int(row.sum())), str(int((row > 0).sum())), largest_classes])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)
