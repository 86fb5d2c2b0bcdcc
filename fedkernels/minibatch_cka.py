"""Debiased CKA estimated from minibatches, whose memory does not grow with the widths of the representations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from fedkernels.internal import checks
from fedkernels.internal.cka_sums import of_normal_tensors
from fedkernels.internal.hsic_pairwise import hsic_pairwise
from fedkernels.internal.similarity import FEWEST_DEBIASED_ROWS, check_batch
from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference.linear_cka import ratio


class MinibatchCKA:
    """The ratio of unbiased estimates of HSIC that are averaged over the batches.

    It approaches debiased CKA as there are more batches, without bias of each HSIC whatever their size; one batch gives
    ``debiased_cka`` itself. It holds ``N M + N + M`` numbers. A batch of L samples needs ``L^2 (N + M)`` numbers in
    its dtype for a moment, or blocks of these where the compiled operator serves. `CKAAccumulator` gives the exact
    value of all samples, in memory that grows with the widths.

    Source: Nguyen et al. 2021, "Do Wide and Deep Networks Learn the Same Things?", Eq. 2 and 3. There all batches have
    the same size. Here a batch of L counts by ``L (L - 3)``, so that a small last one adds little noise.
    """

    def __init__(self) -> None:
        self._hsic: tuple[Tensor, Tensor, Tensor] | None = None  # of pairs [N, M], of x with itself [N], of y [M]
        self._of_lists = False
        self._dtype = torch.float64

    @of_normal_tensors
    def update(self, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor]) -> None:
        """Adds a batch of L samples. No gradient is kept.

        Args:
            x: [L, d1] with L >= 4, float16, bfloat16, float32 or float64, any strides; or a list of N representations
                [L, d_n]. The squares of the entries must be in the range of float32, or of float64.
            y: [L, d2], or a list of M representations, of the same samples.

        Raises:
            TypeError: x or y is not a floating tensor or a list of such.
            ValueError: L < 4, d = 0, unequal L or devices, or other N or M or another device than in the first batch.
        """
        xs, ys = check_batch(x, y)
        rows = len(xs[0])
        if rows < FEWEST_DEBIASED_ROWS:
            raise ValueError(f"a batch must have at least {FEWEST_DEBIASED_ROWS} samples, got {rows}")
        if self._hsic is not None:
            _check_same_layout(self._hsic[0], (len(xs), len(ys)), xs[0], "the first batch")
        with torch.no_grad(), no_autocast(xs[0]):
            dtype = compute_dtype(*xs, *ys) if self._hsic is None else self._dtype
            batch = hsic_pairwise([x.to(dtype) for x in xs], [y.to(dtype) for y in ys])
        if self._hsic is None:
            self._of_lists, self._dtype = not isinstance(x, Tensor), dtype
            self._hsic = batch
        else:
            _add(self._hsic, batch)

    @of_normal_tensors
    def compute(self) -> Tensor:
        """The estimate from all batches so far: [] for tensors, [N, M] for lists, float32 or float64.

        Representations that are constant in every batch have the value 0. Raises ValueError if there are no samples.
        """
        if self._hsic is None:
            raise ValueError("MinibatchCKA has no samples: call update() before compute()")
        cross, xx, yy = self._hsic
        values = ratio(cross, xx[:, None], yy).to(self._dtype)
        return values if self._of_lists else values[0, 0]

    @of_normal_tensors
    def __add__(self, other: MinibatchCKA) -> MinibatchCKA:
        """The estimate from both one's batches, say of two workers. Both stay as they are."""
        if not isinstance(other, MinibatchCKA):
            return NotImplemented
        result = MinibatchCKA()
        for one in (self, other):
            if one._hsic is None:
                continue
            if result._hsic is None:
                cross, xx, yy = one._hsic
                result._hsic = cross.clone(), xx.clone(), yy.clone()
                result._of_lists, result._dtype = one._of_lists, one._dtype
            else:
                _check_same_layout(result._hsic[0], one._hsic[0].shape, one._hsic[0], "the other accumulator")
                _add(result._hsic, one._hsic)
        return result

    @of_normal_tensors
    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Makes this the estimate from all processes' batches, in each of them. Each must have been given a batch."""
        if self._hsic is None:
            raise ValueError("MinibatchCKA has no samples: call update() in each process before all_reduce()")
        for tensor in self._hsic:
            dist.all_reduce(tensor, group=group)


def _check_same_layout(cross: Tensor, counts: tuple[int, ...], x: Tensor, first: str) -> None:
    if cross.shape != counts:
        wanted, given = (" and ".join(map(str, sizes)) for sizes in (cross.shape, counts))
        raise ValueError(f"x and y must hold {wanted} representations as {first}, got {given}")
    checks.same_device(**{first: cross, "x": x})


def _add(total: tuple[Tensor, ...], batch: tuple[Tensor, ...]) -> None:
    for own, added in zip(total, batch, strict=True):
        own += added
