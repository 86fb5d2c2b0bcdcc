"""The sums over samples from which CKA and debiased CKA of a whole data set follow, and how they move to other origins.

u_i is row i of a representation less its origin. Two representations have the sums of u_i v_i', |u_i|^2 v_i and
|u_i|^2 |v_i|^2; a representation has the same sums with itself, and those of u_i and |u_i|^2. About the means they give

    |sum u_i v_i'|_F^2 - n / (n - 2) sum |u_i|^2 |v_i|^2 + sum |u_i|^2 sum |v_i|^2 / ((n - 1) (n - 2))

which is n (n - 3) times the unbiased HSIC, and its first term is the biased one.

Sums are float64; to them products of BLOCK_ROWS rows or fewer are added, which were formed in the samples' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fedkernels.internal.add_products import add_products

BLOCK_ROWS = 1024  # long enough for the full speed of a product, short enough for float32
_P = ParamSpec("_P")
_R = TypeVar("_R")


def of_normal_tensors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs it outside of inference mode, whose tensors could not be added to afterwards."""

    @wraps(method)
    def outside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return outside


@dataclass
class Side:
    """N representations [n, d_l] side by side, with D columns together."""

    widths: list[int]
    origin: Tensor  # [D]
    entries: Tensor  # [D], sums of u
    norms: Tensor  # [N], sums of |u|^2
    products: list[Tensor]  # [d_l, d_l], sums of u u'; below the diagonal they are valid after `mirror` alone
    norms_by_entries: Tensor  # [D], sums of |u|^2 u
    squared_norms: Tensor  # [N], sums of |u|^4

    @classmethod
    def empty(cls, widths: list[int], origin: Tensor) -> Side:
        zeros = origin.new_zeros
        columns, count = sum(widths), len(widths)
        products = [zeros(width, width) for width in widths]
        return cls(widths, origin, zeros(columns), zeros(count), products, zeros(columns), zeros(count))

    def tensors(self) -> list[Tensor]:
        """All that is added where two workers' sums about one origin join."""
        return [self.entries, self.norms, *self.products, self.norms_by_entries, self.squared_norms]

    def per_layer(self, values: Tensor) -> Tensor:
        """[..., D] -> [..., N], the sums over each representation's columns."""
        return torch.stack([part.sum(dim=-1) for part in values.split(self.widths, dim=-1)], dim=-1)

    def per_column(self, values: Tensor) -> Tensor:
        """[N] -> [D]"""
        return values.repeat_interleave(torch.tensor(self.widths, device=values.device))

    def mirror(self) -> None:
        """Makes the products symmetric by what is above the diagonal."""
        for product in self.products:
            upper = product.triu(1)
            torch.add(product.triu_(), upper.mT, out=product)

    def biased_hsic(self, count: int) -> Tensor:
        """Of each representation with itself about the means of `count` samples, but for a factor: [N]."""
        values = []
        for product, entries in zip(self.products, self.entries.split(self.widths), strict=True):
            about_means = _about_means(product, entries, entries, count)
            diagonal, above = about_means.diagonal().clone(), about_means.triu_(1).flatten()
            values.append(diagonal @ diagonal + 2 * (above @ above))
        return torch.stack(values)

    def moved(self, origin: Tensor, count: int) -> Side:
        """The sums of `count` samples about another origin."""
        self.mirror()
        shift = origin - self.origin
        shifts, entries = shift.split(self.widths), self.entries.split(self.widths)
        length, along = self.per_layer(shift.square()), self.per_layer(shift * self.entries)
        norms = self.norms - 2 * along + count * length
        mixed = torch.cat([product @ part for product, part in zip(self.products, shifts, strict=True)])
        products = [
            _less_two_outer_products(product, (sums, part), (part, sums - count * part))
            for product, sums, part in zip(self.products, entries, shifts, strict=True)
        ]
        return Side(
            self.widths,
            origin,
            self.entries - count * shift,
            norms,
            products,
            self.norms_by_entries - 2 * mixed + self.per_column(length) * self.entries - self.per_column(norms) * shift,
            self.squared_norms
            - 4 * self.per_layer(shift * self.norms_by_entries)
            + 4 * self.per_layer(shift * mixed)
            + 2 * length * (self.norms - 2 * along)
            + count * length.square(),
        )


@dataclass
class Sums:
    """Of all pairs of N representations x with M representations y."""

    x: Side
    y: Side
    count: int
    products: Tensor  # [Dx, Dy], sums of u v'
    x_norms_by_y: Tensor  # [N, Dy], sums of |u|^2 v
    y_norms_by_x: Tensor  # [M, Dx], sums of |v|^2 u
    norms: Tensor  # [N, M], sums of |u|^2 |v|^2
    # Of blocks since the last `settle`, for all N + M representations z together: sums of |z|^2 [N + M], of their
    # products with one another [N + M, N + M], and of all columns weighted by each and by 1 [N + M + 1, Dx + Dy].
    unsettled: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, x: Side, y: Side) -> Sums:
        zeros = x.origin.new_zeros
        columns, count = (sum(x.widths), sum(y.widths)), (len(x.widths), len(y.widths))
        by_y, by_x = zeros(count[0], columns[1]), zeros(count[1], columns[0])
        return cls(x, y, 0, zeros(columns), by_y, by_x, zeros(count))

    def tensors(self) -> list[Tensor]:
        own = [self.products, self.x_norms_by_y, self.y_norms_by_x, self.norms]
        return [*self.x.tensors(), *self.y.tensors(), *own]

    def add(self, block: Tensor) -> None:
        """Adds a block [L, Dx + Dy] of at most BLOCK_ROWS samples less the origins. `settle` before any other use."""
        widths, own = [*self.x.widths, *self.y.widths], [*self.x.products, *self.y.products]
        norms, weighted = add_products(block, widths, len(self.x.widths), self.products, own)
        self.count += len(block)
        added = [norms.sum(dim=1), norms @ norms.mT, weighted]
        if self.unsettled:
            for total, of_block in zip(self.unsettled, added, strict=True):
                total += of_block
        else:
            self.unsettled = added

    def settle(self) -> None:
        """Adds what `add` left in `unsettled` to the other sums: many small sums, which would cost each block time."""
        if not self.unsettled:
            return
        (norms, pairs, weighted), self.unsettled = self.unsettled, []
        xs, ys = slice(len(self.x.widths)), slice(len(self.x.widths), None)
        x_weighted, y_weighted = weighted.split([len(side.origin) for side in (self.x, self.y)], dim=1)
        self.norms += pairs[xs, ys]
        self.x_norms_by_y += y_weighted[:-1][xs]
        self.y_norms_by_x += x_weighted[:-1][ys]
        for side, own, columns in ((self.x, xs, x_weighted), (self.y, ys, y_weighted)):
            side.entries += columns[-1]
            side.norms += norms[own]
            side.squared_norms += pairs[own, own].diagonal()
            by_own_norms = columns[:-1][own].split(side.widths, dim=1)
            side.norms_by_entries += torch.cat([part[n] for n, part in enumerate(by_own_norms)])

    def moved(self, x_origin: Tensor, y_origin: Tensor) -> Sums:
        """The sums of the same samples about other origins."""
        x, y, count = self.x.moved(x_origin, self.count), self.y.moved(y_origin, self.count), self.count
        s, t = x_origin - self.x.origin, y_origin - self.y.origin
        s_length, t_length = self.x.per_layer(s.square()), self.y.per_layer(t.square())
        s_by_y = self.x.per_layer((self.products * s[:, None]).mT).mT  # [N, Dy], sums of <s, u> v
        t_by_x = self.y.per_layer(self.products * t).mT  # [M, Dx]
        x_rest = self.x.norms - 2 * self.x.per_layer(s * self.x.entries)
        y_rest = self.y.norms - 2 * self.y.per_layer(t * self.y.entries)
        return Sums(
            x,
            y,
            count,
            _less_two_outer_products(self.products, (self.x.entries, t), (s, self.y.entries - count * t)),
            self.x_norms_by_y - 2 * s_by_y + torch.outer(s_length, self.y.entries) - torch.outer(x.norms, t),
            self.y_norms_by_x - 2 * t_by_x + torch.outer(t_length, self.x.entries) - torch.outer(y.norms, s),
            self.norms
            - 2 * self.y.per_layer(self.x_norms_by_y * t)
            - 2 * self.x.per_layer(self.y_norms_by_x * s).mT
            + 4 * self.y.per_layer(s_by_y * t)
            + torch.outer(x_rest, t_length)
            + torch.outer(s_length, y_rest)
            + count * torch.outer(s_length, t_length),
        )

    def about_means(self) -> Sums:
        return self.moved(*(side.origin + side.entries / self.count for side in (self.x, self.y)))

    def join(self, other: Sums) -> None:
        """Adds the sums of another worker's samples, about the origins of these."""
        moved = other.moved(self.x.origin, self.y.origin)
        for own, added in zip(self.tensors(), moved.tensors(), strict=True):
            own += added
        self.count += other.count

    def biased_hsic(self) -> tuple[Tensor, Tensor, Tensor]:
        """But for a factor: of the pairs [N, M], of the xs [N] and of the ys [M] with themselves."""
        squares = _about_means(self.products, self.x.entries, self.y.entries, self.count).square_()
        cross = self.x.per_layer(self.y.per_layer(squares).mT).mT
        return cross, self.x.biased_hsic(self.count), self.y.biased_hsic(self.count)

    def unbiased_hsic(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of sums that are about the means, but for another factor."""
        n = self.count
        by_norms, by_traces = n / (n - 2), 1 / ((n - 1) * (n - 2))
        cross, xx, yy = self.biased_hsic()
        of_xs, of_ys = (
            own - by_norms * side.squared_norms + by_traces * side.norms.square()
            for own, side in ((xx, self.x), (yy, self.y))
        )
        of_pairs = cross - by_norms * self.norms + by_traces * torch.outer(self.x.norms, self.y.norms)
        return of_pairs, of_xs, of_ys


def _about_means(product: Tensor, x_entries: Tensor, y_entries: Tensor, count: int) -> Tensor:
    return torch.addr(product, x_entries, y_entries, alpha=-1 / count)


def _less_two_outer_products(product: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """``product - a b' - c d'`` for (a, b) and (c, d)."""
    left, right = zip(first, second, strict=True)
    return torch.addmm(product, torch.stack(left, dim=1), torch.stack(right), alpha=-1)
