"""CKA of representations that arrive in batches: exactly the value of the full data set, from sums in feature space."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from fedkernels.internal import checks
from fedkernels.internal.cka_sums import BLOCK_ROWS, Side, Sums, of_normal_tensors
from fedkernels.internal.similarity import FEWEST_DEBIASED_ROWS, check_batch
from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference.debiased_cka import rounding_of_products, zero_up_to
from fedkernels.reference.linear_cka import ratio


class CKAAccumulator:
    """Centred CKA, plain or debiased, of all samples that `update` was given, whatever the sizes of the batches.

    It holds sums in float64: ``d1 d2 + d1^2 + d2^2`` for two representations of these widths. For lists d1 and d2 are
    the widths of all together in the first term, and each representation has a ``d^2`` of its own. Use `MinibatchCKA`
    where that is too much. Sums of 1024 rows at a time are formed in the samples' dtype, whatever the sizes of the
    batches, and added up in float64. So it also holds up to 1024 rows that are not in the sums yet. The sums are taken
    about the means of the first batch, so that large means cost no precision. Batches may come in inference mode, too.

    Source: ``linear_cka(x, y, centered=True)`` and ``debiased_cka(x, y)``. The unbiased HSIC needs the sums of
    ``|x_i|^2 |y_i|^2``, ``|x_i|^2 y_i`` and ``|y_i|^2 x_i`` beyond the products ``x'x``, ``y'y`` and ``x'y``.

    Example::

        accumulator = CKAAccumulator()
        for batch in loader:
            accumulator.update(first(batch), second(batch))
        similarity = accumulator.compute(debiased=True)
    """

    def __init__(self) -> None:
        self._sums: Sums | None = None
        self._of_lists = False
        self._dtype = torch.float64
        self._block: Tensor | None = None  # [BLOCK_ROWS, all columns of x and y], samples less the origins
        self._origins: list[Tensor] = []  # of each representation, in the block's dtype
        self._block_rows = 0  # how many of these rows hold samples that are not in the sums yet

    @property
    def count(self) -> int:
        """The number of samples so far."""
        return 0 if self._sums is None else self._sums.count + self._block_rows

    @of_normal_tensors
    def update(self, x: Tensor | Sequence[Tensor], y: Tensor | Sequence[Tensor]) -> None:
        """Adds a batch of L samples. No gradient is kept.

        Args:
            x: [L, d1], float16, bfloat16, float32 or float64, any strides; or a list of N representations [L, d_n].
            y: [L, d2], or a list of M representations, of the same samples. Widths and device are those of the first
                batch. The squares of the entries must be in the range of float32, or of float64 where one is float64.

        Raises:
            TypeError: x or y is not a floating tensor or a list of such.
            ValueError: L = 0, d = 0, unequal L or devices, or other widths or another device than in the first batch.
        """
        xs, ys = check_batch(x, y)
        widths = [z.shape[1] for z in xs], [z.shape[1] for z in ys]
        with torch.no_grad():
            if self._sums is None:
                self._of_lists, self._dtype = not isinstance(x, Tensor), compute_dtype(*xs, *ys)
                origins = (torch.cat([_mean(z.to(self._dtype)) for z in zs]).double() for zs in (xs, ys))
                self._sums = Sums.empty(*map(Side.empty, widths, origins))
            _check_same_layout(self._sums, *widths, xs[0].device, "the first batch")
            self._add_rows(self._sums, [*xs, *ys])

    def _add_rows(self, sums: Sums, representations: list[Tensor]) -> None:
        """Copies the rows into the block, which is added to the sums whenever it is full."""
        if self._block is None:
            sides = sums.x, sums.y
            self._origins = [origin for side in sides for origin in side.origin.to(self._dtype).split(side.widths)]
            self._block = self._origins[0].new_empty(BLOCK_ROWS, sum(map(len, self._origins)))
        rows, start = representations[0].shape[0], 0
        while start < rows:
            size = min(rows - start, BLOCK_ROWS - self._block_rows)
            free, column = self._block[self._block_rows : self._block_rows + size], 0
            for samples, origin in zip(representations, self._origins, strict=True):
                width = samples.shape[1]
                torch.sub(samples[start : start + size], origin, out=free.narrow(1, column, width))
                column += width
            start += size
            self._block_rows += size
            if self._block_rows == BLOCK_ROWS:
                self._add_block(sums)

    def _add_block(self, sums: Sums) -> None:
        if self._block is not None and self._block_rows > 0:
            with no_autocast(self._block):
                sums.add(self._block[: self._block_rows])
            self._block_rows = 0

    def _all_sums(self) -> Sums | None:
        """The sums with the rows of the block. None: no samples."""
        if self._sums is not None:
            with torch.no_grad():
                self._add_block(self._sums)
                self._sums.settle()
        return self._sums

    @of_normal_tensors
    def compute(self, debiased: bool = False) -> Tensor:
        """CKA of all samples so far: [] for tensors, [N, M] for lists. More batches may follow.

        Args:
            debiased: False for the value of ``linear_cka(..., centered=True)``, True for that of ``debiased_cka``.

        Returns:
            float64 where the first batch had a float64 tensor, else float32, in which products of rows are formed. Zero
            representations are 0 as there.

        Raises:
            TypeError: debiased is not a bool.
            ValueError: there are no samples, or fewer than 4 for debiased CKA.
        """
        checks.boolean("debiased", debiased)
        sums = self._all_sums()
        if sums is None:
            raise ValueError("CKAAccumulator has no samples: call update() before compute()")
        if debiased and self.count < FEWEST_DEBIASED_ROWS:
            raise ValueError(f"debiased CKA needs at least {FEWEST_DEBIASED_ROWS} samples, got {self.count}")
        cross, xx, yy = sums.biased_hsic()
        if debiased:
            # The products of a block have the samples' dtype, the sums over blocks float64.
            of_blocks = rounding_of_products(self._dtype, min(BLOCK_ROWS, self.count))
            rounding = of_blocks + rounding_of_products(torch.float64, self.count)
            x_rounding, y_rounding = rounding * xx, rounding * yy
            cross, xx, yy = sums.about_means().unbiased_hsic()
            xx, yy = zero_up_to(x_rounding, xx), zero_up_to(y_rounding, yy)
        values = ratio(cross, xx[:, None], yy).to(self._dtype)
        return values if self._of_lists else values[0, 0]

    @of_normal_tensors
    def __add__(self, other: CKAAccumulator) -> CKAAccumulator:
        """The accumulator of both one's samples, say of two workers. Both stay as they are."""
        if not isinstance(other, CKAAccumulator):
            return NotImplemented
        result = CKAAccumulator()
        for one in (self, other):
            sums = one._all_sums()
            if sums is None:
                continue
            if result._sums is None:
                result._of_lists, result._dtype = one._of_lists, one._dtype
                result._sums = sums.moved(sums.x.origin, sums.y.origin)  # with tensors of its own
            else:
                x, y = sums.x, sums.y
                _check_same_layout(result._sums, x.widths, y.widths, x.origin.device, "the other accumulator")
                result._sums.join(sums)
        return result

    @of_normal_tensors
    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Makes this the accumulator of all processes' samples, in each of them, by ``torch.distributed``.

        Each process must have been given at least one batch, of the same widths and dtype.
        """
        sums = self._all_sums()
        if sums is None:
            raise ValueError("CKAAccumulator has no samples: call update() in each process before all_reduce()")
        origins = [side.origin.clone() for side in (sums.x, sums.y)]
        for origin in origins:
            dist.broadcast(origin, dist.get_global_rank(group, 0) if group else 0, group)
        sums = sums.moved(*origins)
        count = torch.tensor(sums.count, device=origins[0].device)
        for tensor in (*sums.tensors(), count):
            dist.all_reduce(tensor, group=group)
        sums.count = int(count)
        self._sums, self._block = sums, None  # the block and its origins are made anew


def _mean(x: Tensor) -> Tensor:
    # By way of the first row the mean of a constant column is that constant, and all its sums are exactly 0.
    return x[0] + (x - x[0]).mean(dim=0)


def _check_same_layout(sums: Sums, x_widths: list[int], y_widths: list[int], device: torch.device, first: str) -> None:
    for name, wanted, widths in (("x", sums.x.widths, x_widths), ("y", sums.y.widths, y_widths)):
        if wanted != widths:
            raise ValueError(f"{name} must have the widths {wanted} of {first}, got {widths}")
    if device != sums.x.origin.device:
        raise ValueError(f"x and y must be on the device of {first} ({sums.x.origin.device}), got {device}")
