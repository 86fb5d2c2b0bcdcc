"""How the training samples are divided amongst the clients, as a list of indices, a table and a chart."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import UserError
from ..options import Options

_TRIES = 1000
_MOST_TABLE_COLUMNS = 12
_MOST_LEGEND_ENTRIES = 20


class PartitionOptions(Options):
    """How to divide the samples.

    name: iid (equal random shares); disjoint_classes (Hetero-SSFL, section 5.1); dirichlet (each class is
        divided by its own draw from Dirichlet(alpha), so sizes differ too, Yurochkin et al. 2019); dirichlet_equal
        (equal sizes; each client draws its shares of the classes from Dirichlet(alpha), Hsu et al. 2019);
        quantity_skew (the clients' sizes are drawn from Dirichlet(alpha) and the classes are mixed, Li et al. 2022);
        sites (nothing is divided: every site of engine flower brings its own images).
    clients: number of clients.
    classes_per_client: for disjoint_classes; by default classes // clients.
    alpha: for dirichlet, dirichlet_equal and quantity_skew; small is uneven, large is even.
    min_samples: fewest samples a client may have; dirichlet and quantity_skew are drawn again until it holds.
    """

    name: Literal["iid", "disjoint_classes", "dirichlet", "dirichlet_equal", "quantity_skew", "sites"] = (
        "disjoint_classes"
    )
    clients: int = Field(5, ge=1)
    classes_per_client: int | None = Field(None, ge=1)
    alpha: float = Field(0.5, gt=0)
    min_samples: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> "PartitionOptions":
        if self.classes_per_client is not None and self.name != "disjoint_classes":
            raise ValueError(f"classes_per_client is for name=disjoint_classes, not for name={self.name}; leave it out")
        return self


def partition_indices(labels: Tensor, options: PartitionOptions, seed: int) -> list[Tensor]:
    """Divide samples with integer `labels` [n] amongst `options.clients` clients.

    Returns one sorted int64 index tensor a client; every sample is on exactly one client (with `sites` on none). The
    same labels, options and seed >= 0 always give the same answer.

    Raises:
        UserError: the request cannot be met (too few samples or classes, classes left over, a small client).
    """
    if labels.ndim != 1 or labels.is_floating_point():
        raise TypeError(f"labels must be integers [n], came {labels.dtype} {list(labels.shape)}")
    if options.name == "sites":
        return [torch.empty(0, dtype=torch.int64) for _ in range(options.clients)]
    total = len(labels)
    if total < options.clients * options.min_samples:
        raise UserError(
            f"{total} samples cannot give {options.clients} clients at least {options.min_samples} each; "
            "lower partition.clients or partition.min_samples, or use more data"
        )
    generator = np.random.default_rng(seed)
    # Every partition is a division of groups (the classes, or all samples as one group) into given counts.
    if options.name in ("iid", "quantity_skew"):
        groups = [np.arange(total)]
    else:
        array = labels.cpu().numpy()
        groups = [np.flatnonzero(array == label) for label in np.unique(array)]
    sizes = np.array([len(group) for group in groups])

    if options.name == "iid":
        counts = _equal_shares(sizes, np.ones((1, options.clients), bool))
    elif options.name == "disjoint_classes":
        counts = _equal_shares(sizes, _deal_classes(len(groups), options, generator))
    elif options.name == "dirichlet_equal":
        counts = _class_prior_counts(sizes, options, generator)
    else:
        counts = _dirichlet_counts(sizes, options, generator)
    smallest = int(counts.sum(0).min())
    if smallest < options.min_samples:
        raise UserError(
            f"client {int(counts.sum(0).argmin())} would have {smallest} samples, fewer than "
            f"partition.min_samples={options.min_samples}; use fewer clients or more data"
        )

    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(options.clients)]
    for group, group_counts in zip(groups, counts, strict=True):
        pieces = np.split(generator.permutation(group), np.cumsum(group_counts)[:-1])
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [torch.from_numpy(np.sort(np.concatenate(part)).astype(np.int64)) for part in parts]


def _deal_classes(classes: int, options: PartitionOptions, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Which client holds which class, [classes, clients], as in Hetero-SSFL, section 5.1.

    Each client in turn takes the classes that the fewest clients hold so far, ties broken at random. So no
    client gets a class twice, all classes are held by equally many clients (within one), and where there are
    no more places than classes nothing is shared.
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


def _equal_shares(sizes: NDArray[np.int64], holds: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts [groups, clients]: each group divided equally (within one) amongst the clients that hold it."""
    counts = np.zeros(holds.shape, np.int64)
    for group, size in enumerate(sizes):
        holders = np.flatnonzero(holds[group])
        share, rest = divmod(int(size), len(holders))
        counts[group, holders] = share
        counts[group, holders[:rest]] += 1
    return counts


def _dirichlet_counts(
    sizes: NDArray[np.int64], options: PartitionOptions, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Counts [groups, clients]: each group divided by its own draw, repeated until no client is too small."""
    most = 0
    for _ in range(_TRIES):
        shares = generator.dirichlet(np.full(options.clients, options.alpha), size=len(sizes))
        edges = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        edges[:, -1] = sizes
        counts = np.diff(edges, axis=1, prepend=0)
        smallest = int(counts.sum(0).min())
        if smallest >= options.min_samples:
            return counts
        most = max(most, smallest)
    raise UserError(
        f"{options.name} with alpha={options.alpha:g}: in {_TRIES} draws the smallest of {options.clients} "
        f"clients never had more than {most} samples, and partition.min_samples={options.min_samples}; "
        "raise partition.alpha, or lower partition.clients or partition.min_samples"
    )


def _class_prior_counts(
    sizes: NDArray[np.int64], options: PartitionOptions, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Counts [groups, clients] whose column sums are equal within one: Hsu et al. 2019, section 3, dealt to the end.

    Each client draws its class prior from Dirichlet(alpha * C * p) with p [C] the classes' frequencies; the factor C
    makes it Dirichlet(alpha, ..., alpha) for balanced classes. The clients take one sample after another in turns, each
    from a class drawn by its prior amongst the classes that have samples left, or, where its prior holds none of
    these, by what is left. (Hsu et al. deal no more than their clients need; here every sample is dealt, so the last
    ones fit the priors less.)
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
    """Samples of each class on each client: int64 [clients, classes]; `labels` [n] are below `classes`."""
    return torch.stack([torch.bincount(labels[index], minlength=classes) for index in indices])


def format_partition(counts: Tensor, class_names: Sequence[str]) -> str:
    """A plain-text table of `counts` [clients, classes] with totals.

    Up to 12 classes have a column each; of more, each client's number of classes and its largest three stand.
    """
    clients, classes = _checked_shape(counts, class_names)
    totals = counts.sum(0)
    rows = [(str(client), counts[client]) for client in range(clients)] + [("total", totals)]
    if classes <= _MOST_TABLE_COLUMNS:
        cells = [["client", *class_names, "total"]]
        cells += [[name, *map(str, row.tolist()), str(int(row.sum()))] for name, row in rows]
    else:
        cells = [["client", "total", "classes", "largest classes"]]
        for name, row in rows:
            largest = [index for index in row.argsort(descending=True, stable=True)[:3].tolist() if row[index] > 0]
            listed = ", ".join(f"{class_names[index]} ({int(row[index])})" for index in largest)
            cells.append([name, str(int(row.sum())), str(int((row > 0).sum())), listed])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    text_column = 3 if classes > _MOST_TABLE_COLUMNS else None
    lines = []
    for line in cells:
        padded = [
            cell.ljust(width) if column == text_column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def draw_partition(counts: Tensor, class_names: Sequence[str]) -> "Figure":
    """A chart of `counts` [clients, classes]: one stacked horizontal bar a client, one colour a class.

    The figure needs no display and no global state; save it with `figure.savefig`.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    clients, classes = _checked_shape(counts, class_names)
    if classes <= 10:
        colours = [colormaps["tab10"](index) for index in range(classes)]
    elif classes <= _MOST_LEGEND_ENTRIES:
        colours = [colormaps["tab20"](index) for index in range(classes)]
    else:
        colours = [colormaps["turbo"](index / (classes - 1)) for index in range(classes)]

    legend_entries = classes if classes <= _MOST_LEGEND_ENTRIES else 0
    height = max(3, min(1 + 0.45 * clients, 40), 0.8 + 0.22 * legend_entries)  # inches
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    sizes = counts.cpu().numpy()
    ends = sizes.cumsum(1)
    for client in range(clients):
        held = np.flatnonzero(sizes[client])
        pieces = [(ends[client, index] - sizes[client, index], sizes[client, index]) for index in held]
        axes.broken_barh(pieces, (client - 0.4, 0.8), facecolors=[colours[index] for index in held])
        total = int(ends[client, -1])
        axes.annotate(f"{total:,}", (total, client), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xlim(0, max(1, 1.08 * ends[:, -1].max()))
    axes.set_ylim(clients - 0.5, -0.5)
    axes.set_yticks(range(0, clients, max(1, clients // 50)))
    axes.set(xlabel="training samples", ylabel="client")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend_entries:
        handles = [Patch(color=colour, label=name) for colour, name in zip(colours, class_names, strict=True)]
        figure.legend(handles=handles, title="class", loc="outside right upper", fontsize=9)
    else:
        scale = ScalarMappable(Normalize(-0.5, classes - 0.5), ListedColormap(colours))
        figure.colorbar(scale, ax=axes, label="class number", pad=0.02)
    return figure


def _checked_shape(counts: Tensor, class_names: Sequence[str]) -> tuple[int, int]:
    if counts.ndim != 2 or counts.shape[1] != len(class_names):
        raise ValueError(
            f"counts must be [clients, classes] with {len(class_names)} classes, came {list(counts.shape)}"
        )
    return counts.shape[0], counts.shape[1]
