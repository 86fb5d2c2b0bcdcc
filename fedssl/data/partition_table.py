"""How many samples of each class each client has, as numbers and as a table."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_CLASS_COLUMNS = 12


def class_counts(labels: Tensor, indices: Sequence[Tensor], classes: int) -> Tensor:
    """Samples of each class on each client: int64 [clients, classes]; `labels` [n] are below `classes`."""
    return torch.stack([torch.bincount(labels[index], minlength=classes) for index in indices])


def format_partition(counts: Tensor, class_names: Sequence[str]) -> str:
    """A plain-text table of `counts` [clients, classes] with totals.

    Up to 12 classes have a column each. With more classes, a row has the number of classes and the three largest.
    """
    _, classes = checked_shape(counts, class_names)
    rows = [(str(client), row) for client, row in enumerate(counts)] + [("total", counts.sum(0))]
    if classes <= _MOST_CLASS_COLUMNS:
        cells = [["client", *class_names, "total"]]
        cells += [[name, *map(str, row.tolist()), str(int(row.sum()))] for name, row in rows]
        return _aligned(cells)
    cells = [["client", "total", "classes", "largest classes"]]
    for name, row in rows:
        largest = [index for index in row.argsort(descending=True, stable=True)[:3].tolist() if row[index] > 0]
        listed = ", ".join(f"{class_names[index]} ({int(row[index])})" for index in largest)
        cells.append([name, str(int(row.sum())), str(int((row > 0).sum())), listed])
    return _aligned(cells, left_column=3)


def _aligned(cells: list[list[str]], left_column: int | None = None) -> str:
    """Lines of columns that are aligned to the right, but for `left_column`."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if column == left_column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def checked_shape(counts: Tensor, class_names: Sequence[str]) -> tuple[int, int]:
    """Clients and classes of `counts`; ValueError unless it is [clients, classes] with a name for each class."""
    if counts.ndim != 2 or counts.shape[1] != len(class_names):
        raise ValueError(f"counts must be [clients, classes] with {len(class_names)} classes, got {list(counts.shape)}")
    return counts.shape[0], counts.shape[1]
