"""Inputs of operators by kind, of any size: `rows`, `columns`, `more` (a further size, or 0) and a seed -> tensors.

Floating ones are in float64 and come first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FP64 = torch.float64
Inputs = Callable[[int, int, int, int], list[Tensor]]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


# ---- contrastive losses: rows, columns and further keys -----------------------------------------------------


def rows_of(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of length 1 or so, of entries that all dtypes hold."""
    return (randn(rows, columns, seed=seed) / columns**0.5).to(torch.bfloat16).to(FP64)


def queries_and_keys(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    return [rows_of(rows, columns, seed), rows_of(rows + more, columns, seed + 1)]


def pairs(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    return queries_and_keys(rows, columns, 0, seed)


def rows_and_directions(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    return [rows_of(rows, columns, seed), randn(columns, 3, seed=seed + 1)]


def with_negatives(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    """Queries, as many keys, and further keys."""
    return [*pairs(rows, columns, more, seed), rows_of(max(more, 1), columns, seed + 2)]


def features(parity: int) -> Inputs:
    """An even or odd number of rows."""
    return lambda rows, columns, more, seed: [rows_of(rows + (rows - parity) % 2, columns, seed)]


def with_scalars(inputs: Inputs, *scalars: float) -> Inputs:
    """Tensors of one entry behind the others."""
    return lambda *sizes: [*inputs(*sizes), *(torch.tensor(scalar, dtype=FP64) for scalar in scalars)]


def labels_of(*matrices: Tensor, classes: int = 5) -> Tensor:
    """For their rows, one below the other."""
    return torch.arange(sum(matrix.shape[0] for matrix in matrices), device=matrices[0].device) % classes


def mask_of(query: Tensor, key: Tensor) -> Tensor:
    return labels_of(query, classes=7)[:, None] == labels_of(key)


# What is summed in the value, and in the gradient of each input: rounding is as large as the dtype's part of it.


def of_similarities(tensors: list[Tensor], **options: Any) -> tuple[float, list[float]]:
    """Logits and their sums."""
    matrices, scalars = [x for x in tensors if x.ndim == 2], [x for x in tensors if x.ndim == 0]
    largest, rows = max(float(x.detach().abs().max()) for x in matrices), len(matrices[0])
    factor = options.get("logit_scale") or 1 / options.get("temperature", 0.2)
    reduction = options.get("reduction")
    value = 1 + (rows if reduction == "sum" else 1) * largest**2 * factor
    of_scalar = (1 if reduction == "mean" else rows) * (1 + largest**2 * factor) * factor
    return value, [largest * factor] * len(matrices) + [of_scalar] * len(scalars)


def of_all_pairs(tensors: list[Tensor], **options: Any) -> tuple[float, list[float]]:
    """The same where each row sums the losses of all pairs."""
    value, gradients = of_similarities(tensors, **options)
    return (3 + value) * len(tensors[0]), [len(tensors[0]) * scale for scale in gradients]


# ---- CKA: L samples and their widths ------------------------------------------------------------------------


def representations(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    return [randn(rows, columns, seed=seed) + 0.3, randn(rows, max(more, 1), seed=seed + 1) - 0.2]


def batches(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    """Whose leading dimensions broadcast."""
    return [randn(2, 1, rows, columns, seed=seed) + 0.3, randn(3, rows, max(more, 1), seed=seed + 1) - 0.2]


def three(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    return [*representations(rows, columns, more, seed), randn(rows, 9, seed=seed + 2) + 0.1]


def at_least(fewest: int, inputs: Inputs) -> Inputs:
    return lambda rows, *sizes: inputs(max(rows, fewest), *sizes)


def with_kernel(inputs: Inputs) -> Inputs:
    def call(*sizes: int) -> list[Tensor]:
        x, y = inputs(*sizes)
        return [x, y @ y.mT / y.shape[-1]]

    return call


def of_cka(tensors: list[Tensor], **_: Any) -> tuple[float, list[float]]:
    """d CKA / dx is a few times 1 / |x|_2, and |x|_F^2 <= rank |x|_2^2; of lists it is the sum of as many."""
    norms = [float(x.detach().norm(dim=(-2, -1)).min()) for x in tensors]
    ranks = [min(x.shape[-2:]) for x in tensors]
    return 1.0, [8 * rank**0.5 / norm if norm else 0.0 for rank, norm in zip(ranks, norms, strict=True)]


# ---- transport: costs of rows and columns -------------------------------------------------------------------


def problem(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    """Costs around half the price of the masses, so that some pairs are worth it and some are not."""
    masses = [0.3 + 0.7 * randn(size, seed=seed + size).sigmoid() for size in (rows, columns)]
    return [2 * randn(rows, columns, seed=seed).sigmoid(), *masses]


def problems(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    """A batch that shares the masses of its columns."""
    each = [problem(rows, columns, more, seed + shift) for shift in (0, 1)]
    return [torch.stack([cost for cost, _, _ in each]), torch.stack([a for _, a, _ in each]), each[0][2]]


def one_pair(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    """Or two: steepest descent takes tens of thousands of steps for more."""
    return problem(min(rows, 2), 1, more, seed)


def masks(cost: Tensor, *_: Tensor) -> dict[str, Tensor]:
    """Each fourth row and the last column are padding, and never the first."""
    row, column = (torch.arange(size, device=cost.device) for size in cost.shape[-2:])
    return {"row_mask": row % 4 != 3, "column_mask": (column == 0) | (column < cost.shape[-1] - 1)}


# ---- the server's step, and views ---------------------------------------------------------------------------


def gram(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    """Of rows and of what they share, rounded so that bfloat16 leaves it definite."""
    deltas = randn(rows, 10 * rows, seed=seed) + 0.5 * randn(1, 10 * rows, seed=seed + 1)
    return [(deltas @ deltas.T).round(decimals=1)]


def models(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    start = rows_of(rows, columns, seed)
    return [start, start + 1, -start]


def images(rows: int, columns: int, more: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (rows, 3, 7, 9), generator=generator, dtype=torch.uint8), torch.arange(rows)]
