"""The sums over samples from which CKA and debiased CKA of a whole data set follow, and how they move to other origins.

u_i is row i of a representation less its origin. Two representations have the sums of u_i v_i', |u_i|^2 v_i and
|u_i|^2 |v_i|^2; a representation has the same sums with itself, and those of u_i and |u_i|^2. About the means they give

    |sum u_i v_i'|_F^2 - n / (n - 2) sum |u_i|^2 |v_i|^2 + sum |u_i|^2 sum |v_i|^2 / ((n - 1) (n - 2))

which is n (n - 3) times the unbiased HSIC, and its first term is the biased one.

Sums are float64. The products of at most BLOCK_ROWS rows are formed in the samples' dtype and then added to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK_ROWS = 1024  # long enough for the full speed of a product, short enough for float32
SYMMETRIC_STRIP = 128  # rows of a symmetric product that are formed together, from their diagonal on


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

    def add(self, block: Tensor) -> Tensor:
        """Adds the products and squared norms of a block [L, D]. -> Its squared norms, float64 [N, L]."""
        parts = block.split(self.widths, dim=1)
        for product, part in zip(self.products, parts, strict=True):
            for start in range(0, len(product), SYMMETRIC_STRIP):
                strip = part[:, start : start + SYMMETRIC_STRIP]
                product[start : start + SYMMETRIC_STRIP, start:] += strip.mT @ part[:, start:]
        norms = torch.stack([part.square().sum(dim=1) for part in parts]).double()
        self.norms += norms.sum(dim=1)
        self.squared_norms += norms.square().sum(dim=1)
        return norms

    def mirror(self) -> None:
        """Fills the products below the diagonal, which `add` leaves out but for the strips' own squares."""
        for product in self.products:
            for start in range(0, len(product), SYMMETRIC_STRIP):
                end = start + SYMMETRIC_STRIP
                product[end:, start:end] = product[start:end, end:].mT

    def moved(self, origin: Tensor, count: float) -> Side:
        """The sums of `count` samples about another origin."""
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
        """Adds a block [L, Dx + Dy] of at most BLOCK_ROWS samples less the origins. Call `mirror` after the last."""
        columns = [len(side.origin) for side in (self.x, self.y)]
        x, y = block.split(columns, dim=1)
        self.count += len(block)
        self.products += x.mT @ y
        x_norms, y_norms = self.x.add(x), self.y.add(y)
        self.norms += x_norms @ y_norms.mT
        # In one product, the sums over rows of each norm times the columns, and of the columns. Norms are divided by
        # the largest, since the cubes of entries may be out of float32's range where their squares are in it.
        weights = torch.cat([x_norms, y_norms, x_norms.new_ones(1, len(block))])
        largest = weights.amax(dim=1, keepdim=True)
        weights = weights / torch.where(largest == 0, 1, largest)
        weighted = (weights.to(block.dtype) @ block).double() * largest
        counts = [len(x_norms), len(y_norms), 1]
        (xx, yx, x_entries), (xy, yy, y_entries) = (part.split(counts) for part in weighted.split(columns, dim=1))
        self.x_norms_by_y += xy
        self.y_norms_by_x += yx
        for side, by_norms, entries in ((self.x, xx, x_entries), (self.y, yy, y_entries)):
            side.entries += entries[0]
            own = [part[n] for n, part in enumerate(by_norms.split(side.widths, dim=1))]
            side.norms_by_entries += torch.cat(own)

    def mirror(self) -> None:
        """Makes the symmetric products whole, of which `add` forms one half."""
        self.x.mirror()
        self.y.mirror()

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

    def plus(self, other: Sums) -> Sums:
        """The sums of both workers' samples, about the origins of the first."""
        result = replace(self).moved(self.x.origin, self.y.origin)  # with tensors of its own
        moved = other.moved(self.x.origin, self.y.origin)
        for own, added in zip(result.tensors(), moved.tensors(), strict=True):
            own += added
        result.count += other.count
        return result

    def hsic(self, debiased: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """HSIC of sums about the means, but for a factor: of the pairs [N, M], of the xs [N] and of the ys [M] alone.

        The last two are the biased ones of the xs and of the ys, to whose size the products are rounded.
        """
        cross = self.y.per_layer(self.x.per_layer(self.products.square().mT).mT)
        xx, yy = (torch.stack([product.square().sum() for product in side.products]) for side in (self.x, self.y))
        if not debiased:
            return cross, xx, yy, xx, yy
        n = self.count
        by_norms, by_traces = n / (n - 2), 1 / ((n - 1) * (n - 2))
        of_xs, of_ys = (
            own - by_norms * side.squared_norms + by_traces * side.norms.square()
            for own, side in ((xx, self.x), (yy, self.y))
        )
        of_pairs = cross - by_norms * self.norms + by_traces * torch.outer(self.x.norms, self.y.norms)
        return of_pairs, of_xs, of_ys, xx, yy


def _less_two_outer_products(product: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """``product - a b' - c d'`` for (a, b) and (c, d)."""
    left, right = zip(first, second, strict=True)
    return torch.addmm(product, torch.stack(left, dim=1), torch.stack(right), alpha=-1)
