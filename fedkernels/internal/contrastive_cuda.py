"""The contrastive losses on CUDA: torch's BLAS forms the products, csrc/cuda/contrastive_tiles.cu the rest.

The logits of all pairs are formed in tiles. A first pass joins their log-sum-exps over the keys and, where they are
wanted, over the queries. A second pass forms the tiles again; the weights of a tile's pairs take the logits' place, and
two more products make gradients of them. Where a tile holds all keys of its queries, one pass does both. Tiles depend
on shapes and dtypes only.

16-bit rows are multiplied as they are, and products summed and returned in float32. Their weights are rounded to 16
bits, but for the positives', whose rounding is made good: there p - 1 may be anything between -1 and nearly 0. The
functions have the schemas of the operators and run below autograd, as in linear_cka_cuda.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast
from fedkernels.reference._reduce import reduce

# Of a tile's logits. Large tiles are faster, though they do not stay in the second-level cache: see csrc/README.md.
# Where no gradient is formed with the loss (`recompute`, which is asked for to save memory), half of that cache.
TILE_BYTES, LEAN_TILE_BYTES = 256 << 20, 24 << 20
_TILE_ROWS = 2048
# Tiles of all keys have at least so many rows, or all: with fewer, reading the keys takes longer than multiplying them,
# and so does reading and writing their gradient. These, and the widths of one kernel, are modelled in csrc/README.md.
_FEWEST_ROWS, _FEWEST_ROWS_OF_KEY_GRADIENT = 256, 1024
_WIDEST_IN_ONE = 256
WEIGHT_SCALE = 4096.0  # weights may be as small as 1 / N: scaled, float16 holds them as normal numbers

_ops = torch.ops.fedkernels


class _Pairs(NamedTuple):
    """Queries and keys in parts that lie one below the other, and which of their pairs count."""

    queries: Sequence[Tensor]
    keys: Sequence[Tensor]
    dtype: torch.dtype  # what is multiplied
    scale: float = 1.0
    shift: int = -1  # the positive of query i is key (i + shift) % N; -1: see positives
    positives: Tensor | None = None
    query_labels: Tensor | None = None
    key_labels: Tensor | None = None
    excluded: Tensor | None = None
    leave_out_self: bool = False
    factor: Tensor | None = None  # float64 [] on the device: what the logits are multiplied with beside `scale`
    lean: bool = False

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.queries)), sum(map(len, self.keys))

    @property
    def of_a_tile(self) -> int:
        """How many entries a tile may have."""
        return (LEAN_TILE_BYTES if self.lean else TILE_BYTES) // self.sums.itemsize

    def place(self, first: int, first_key: int) -> list[int]:
        """What the kernels take of a tile that begins with this query and this key."""
        return [first, first_key, self.shape[1], self.shift, int(self.leave_out_self), 0]

    def or_empty(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        empty = self.queries[0].new_empty(0)
        return [empty if one is None else one for one in tensors]

    def options(self) -> tuple[float, list[Tensor]]:
        return self.scale, self.or_empty(
            (self.positives, self.query_labels, self.key_labels, self.excluded, self.factor, None)
        )


def _holds_all_keys(pairs: _Pairs, key_gradient: bool) -> bool:
    """Does a tile hold all keys of its queries?"""
    queries, keys = pairs.shape
    fewest = _FEWEST_ROWS_OF_KEY_GRADIENT if key_gradient else _FEWEST_ROWS
    return pairs.of_a_tile // keys >= min(queries, fewest)


class _Tiles:
    """How a problem is cut into tiles, and the memory of one."""

    def __init__(self, pairs: _Pairs, key_gradient: bool, weights: bool) -> None:
        queries, keys = pairs.shape
        entries = pairs.of_a_tile
        all_keys = _holds_all_keys(pairs, key_gradient)
        self.rows = min(entries // keys if all_keys else _TILE_ROWS, queries)
        self.columns = keys if all_keys else min(entries // _TILE_ROWS, keys)
        like, size, self._dtype = pairs.queries[0], self.rows * self.columns, pairs.dtype
        self._products = like.new_empty(size, dtype=pairs.sums)
        narrow = weights and pairs.dtype != pairs.sums
        self._weights = like.new_empty(size, dtype=pairs.dtype) if narrow else self._products

    def products(self, query: Tensor, key: Tensor) -> Tensor:
        out = self._products[: len(query) * len(key)].view(len(query), len(key))
        return multiplied(query.to(self._dtype), key.to(self._dtype).T, out.dtype, out)

    def weights(self, products: Tensor) -> Tensor:
        """The memory that a tile's weights are written to."""
        return self._weights[: products.numel()].view(products.shape)


class _Given(NamedTuple):
    """What the pairs' weights are made of: log-sum-exps [B] and [N] and the weights, float64 or missing.

    Missing weights are the constants.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    row_weights: Tensor | None = None
    column_weights: Tensor | None = None
    positive_weights: Tensor | None = None
    constants: tuple[float, float, float] = (0.0, 0.0, 0.0)


class _Results(NamedTuple):
    """Log-sum-exps [B] and [N] (or without entries), and the positives' logits [B], NaN where there are none.

    Also an empty tensor, for no classes are counted.
    """

    rows: Tensor
    columns: Tensor
    of_positives: Tensor
    counted: Tensor


def _no_results(pairs: _Pairs, columns: bool = False) -> _Results:
    """Memory for them: the first tile of a row or column finds nothing there."""
    queries, keys = pairs.shape
    sizes = queries, keys if columns else 0, queries, 0
    return _Results(*(pairs.queries[0].new_empty(size, dtype=torch.float64) for size in sizes))


def _pieces(parts: Sequence[Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
    """Some rows at a time, none across two parts, with the number of the first one."""
    first = 0
    for part in parts:
        for piece in part.split(size):
            yield first, piece
            first += len(piece)


def _positives(pairs: _Pairs, first: int, count: int) -> Tensor:
    """The positives of these queries, or fewer."""
    if pairs.positives is not None:
        return pairs.keys[0].index_select(0, pairs.positives[first : first + count])
    return _rows_from(pairs.keys, (first + pairs.shift) % pairs.shape[1], count)


def _rows_from(parts: Sequence[Tensor], first: int, count: int) -> Tensor:
    """Rows that lie in one part."""
    for part in parts:
        if first < len(part):
            return part[first : first + count]
        first -= len(part)
    return parts[0][:0]


def returns_wide(first: Tensor) -> bool:
    """Does torch return products of these 16-bit rows in float32? It refuses under settings of the user's."""
    if first.is_cpu or not first.is_cuda:
        return not first.is_cpu
    narrow_sums = first.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
    return not narrow_sums and not (len(first) == 1 and torch.cuda.tunable.is_enabled())


def multiplied(first: Tensor, second: Tensor, dtype: torch.dtype, to: Tensor | None = None) -> Tensor:
    """first @ second in `dtype`, of matrices of one dtype; in the memory `to` if there is one."""
    if first.dtype == dtype:
        return torch.mm(first, second, out=to)
    if returns_wide(first):
        return torch.mm(first, second, out_dtype=dtype, out=to)
    return torch.mm(first.to(dtype), second.to(dtype), out=to)


def _add_product(to: Tensor, first: Tensor, second: Tensor, factor: float, fresh: bool = False) -> None:
    """`to` += factor first @ second; `fresh` memory holds nothing yet."""
    beta = 0 if fresh else 1
    if first.dtype == to.dtype:
        to.addmm_(first, second, beta=beta, alpha=factor)
    elif returns_wide(first):
        torch.addmm(to, first, second, out_dtype=to.dtype, beta=beta, alpha=factor, out=to)
    else:
        to.addmm_(first.to(to.dtype), second.to(to.dtype), beta=beta, alpha=factor)


def product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """first @ second in `dtype`; where both have the same 16 bits they are multiplied as they are."""
    if first.dtype != second.dtype:
        first, second = first.to(dtype), second.to(dtype)
    return multiplied(first, second, dtype)


def add_weighted(to: Tensor, weights: Tensor, rows: Tensor) -> None:
    """to += weights @ rows, for weights of at most about 1. Rows of 16 bits meet them in two parts of 16 bits."""
    if rows.dtype == to.dtype or not rows.is_cuda:
        to.addmm_(weights, rows.to(to.dtype))
        return
    weights = weights * WEIGHT_SCALE
    high = weights.to(rows.dtype)
    for part in (high, (weights - high).to(rows.dtype)):
        _add_product(to, part, rows, 1 / WEIGHT_SCALE)


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """The sum over all entries of rows times rows, float64, without a copy of all of them."""
    pairs = zip(first.split(_TILE_ROWS), second.split(_TILE_ROWS), strict=True)
    return torch.stack([(one * other).sum(dtype=torch.float64) for one, other in pairs]).sum()


def _add_sums(pairs: _Pairs, results: _Results) -> None:
    """Fills the results."""
    tiles, options = _Tiles(pairs, key_gradient=False, weights=False), pairs.options()
    for first, query in _pieces(pairs.queries, tiles.rows):
        for first_key, key in _pieces(pairs.keys, tiles.columns):
            products = tiles.products(query, key)
            _ops.contrastive_sums(products, pairs.place(first, first_key), *options, *results)


def _gradients(
    pairs: _Pairs,
    given: _Given,
    of_query: Tensor | None,
    of_key: Tensor | None,
    unit: Tensor | None = None,
    fresh: _Results | None = None,
) -> None:
    """Writes the gradients that are wanted, times `unit`. `fresh` results are filled on the way, or before.

    One pass serves both gradients where the keys' one has the dtype of its sums, and is added to in place. A narrower
    one has a pass of its own, with sums of some keys at a time.
    """
    if of_query is not None and of_key is not None and pairs.sums != of_key.dtype:
        _gradients(pairs, given, of_query, None, unit, fresh)
        _gradients(pairs, given, None, of_key, unit)
        return
    if pairs.factor is not None:
        unit = pairs.factor if unit is None else unit * pairs.factor
    if fresh is not None and not _holds_all_keys(pairs, of_key is not None):
        _add_sums(pairs, fresh)
        fresh = None
    tiles, options = _Tiles(pairs, key_gradient=of_key is not None, weights=True), pairs.options()
    queries, keys = pairs.shape
    narrow = pairs.dtype != pairs.sums
    made_good = narrow and (pairs.shift >= 0 or pairs.positives is not None)
    scale = WEIGHT_SCALE if narrow else 1.0
    factor = pairs.scale / scale
    of_weights = pairs.or_empty(given[:5])
    rest = pairs.queries[0].new_empty(queries if made_good else 0, dtype=pairs.sums)

    def add(
        first: int, query: Tensor, first_key: int, key: Tensor, to_query: Tensor | None, to_key: Tensor | None
    ) -> None:
        products = tiles.products(query, key)
        place = products, pairs.place(first, first_key)
        if fresh is not None:
            _ops.contrastive_sums(*place, *options, *fresh)
        weights = tiles.weights(products)
        _ops.contrastive_weights(*place, *options, of_weights, given.constants, scale, weights, rest)
        if to_query is not None:
            _add_product(to_query, weights, key.to(pairs.dtype), factor, fresh=first_key == 0)
        if to_key is not None:
            _add_product(to_key, weights.T, query.to(pairs.dtype), factor, fresh=first == 0)

    def finish(sums: Tensor, positives: Tensor, of_positives: Tensor, to: Tensor) -> None:
        if made_good:
            sums[: len(positives)].addcmul_(positives, of_positives[: len(positives), None], value=factor)
        if unit is not None:
            torch.mul(sums, unit.to(sums.dtype), out=to)
        elif to is not sums:
            to.copy_(sums)

    def finish_by_index(to: Tensor) -> None:
        """What `finish` adds to the keys' gradient, where the positives are not one behind the other."""
        if not made_good or pairs.positives is None:
            return
        for first, query in _pieces(pairs.queries, tiles.rows):
            last = first + len(query)
            parts = query * (rest[first:last, None] * factor)
            if unit is not None:
                parts *= unit.to(parts.dtype)
            to.index_put_((pairs.positives[first:last],), parts, accumulate=True)  # sorts, and so keeps to one order

    most = tiles.columns if of_query is None else tiles.rows
    memory = pairs.queries[0].new_empty((most, pairs.queries[0].shape[1]), dtype=pairs.sums)
    if of_query is None and of_key is not None:
        for first_key, key in _pieces(pairs.keys, tiles.columns):
            sums = memory[: len(key)]
            for first, query in _pieces(pairs.queries, tiles.rows):
                add(first, query, first_key, key, None, sums)
            positives = _rows_from(pairs.queries, first_key, len(key) if pairs.positives is None else 0)
            finish(sums, positives, rest[first_key : first_key + len(key)], of_key[first_key : first_key + len(key)])
        finish_by_index(of_key)
        return
    for first, query in _pieces(pairs.queries, tiles.rows):
        sums = memory[: len(query)]
        for first_key, key in _pieces(pairs.keys, tiles.columns):
            to_key = None if of_key is None else of_key[first_key : first_key + len(key)]
            add(first, query, first_key, key, sums, to_key)
        if of_query is not None:
            positives = _positives(pairs, first, len(query) if made_good else 0)
            finish(sums, positives, rest[first : first + len(query)], of_query[first : first + len(query)])
    if of_key is not None:
        finish(of_key, _rows_from(pairs.queries, 0, keys if pairs.positives is None else 0), rest, of_key)
        finish_by_index(of_key)


def _multiplied(*rows: Tensor) -> torch.dtype:
    """What rows are multiplied in: 16 bits where they have them, else the dtype of their sums."""
    same = all(one.dtype == rows[0].dtype for one in rows)
    return rows[0].dtype if same else compute_dtype(*rows)


def in_units(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of at most 1, so that float16 holds what they are multiplied with, and their unit."""
    unit = weights.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    unit = torch.where(unit > 0, unit, 1.0)
    return weights / unit, unit


def in_one(query: Tensor, key: Tensor) -> bool:
    """Does the kernel that forms its products itself serve? It is for the query's gradient alone."""
    width = query.shape[1]
    if query.dtype != key.dtype or query.dtype.itemsize != 2 or width > _WIDEST_IN_ONE:
        return False
    if width <= 128 or query.device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(query.device)
    return bool(properties.shared_memory_per_block_optin >= 160 << 10)  # type: ignore[attr-defined]


def _padded(rows: Tensor) -> Tensor:
    """The rows as that kernel reads them: of 64, 128 or 256 columns, from a multiple of 16 bytes on."""
    missing = next(width for width in (64, 128, _WIDEST_IN_ONE) if width >= rows.shape[1]) - rows.shape[1]
    if missing:
        return torch.nn.functional.pad(rows, (0, missing))
    return rows.clone() if rows.data_ptr() % 16 else rows


def info_nce(
    query: Tensor,
    key: Tensor,
    temperature: float,
    reduction: str,
    query_gradient: bool,
    key_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, later = compute_dtype(query, key), reduction == "none" and key_gradient
    query_gradient, key_gradient = query_gradient and not later, key_gradient and not later
    if not key_gradient and in_one(query, key):
        rows = (_padded(one) for one in (query, key))
        losses, of_query = _ops.contrastive_in_one(*rows, temperature, query_gradient)
        of_query = of_query[:, : query.shape[1]].contiguous() if query_gradient else of_query.new_empty(0)
        return reduce(losses.double(), reduction).to(dtype), of_query, key.new_empty(0, dtype=dtype)
    of_query, of_key = (
        one.new_empty(one.shape if wanted else 0, dtype=dtype)
        for one, wanted in ((query, query_gradient), (key, key_gradient))
    )
    lean = not (query_gradient or key_gradient)
    pairs = _Pairs([query], [key], _multiplied(query, key), 1 / temperature, shift=0, lean=lean)
    results = _no_results(pairs)
    with no_autocast(query):
        if query_gradient or key_gradient:
            given = _Given(rows=results.rows, constants=(1.0, 0.0, -1.0))
            wanted = of_query if query_gradient else None, of_key if key_gradient else None
            _gradients(pairs, given, *wanted, fresh=results)
        else:
            _add_sums(pairs, results)
    return reduce(results.rows - results.of_positives, reduction).to(dtype), of_query, of_key


def info_nce_gradients(
    query: Tensor,
    key: Tensor,
    temperature: float,
    weights: Tensor,
    query_gradient: bool,
    key_gradient: bool,
) -> tuple[Tensor, Tensor]:
    pairs = _Pairs([query], [key], _multiplied(query, key), 1 / temperature, shift=0, lean=True)
    results, (weights, unit) = _no_results(pairs), in_units(weights)
    of_query = query.new_empty(query.shape if query_gradient else 0)
    of_key = key.new_empty(key.shape if key_gradient else 0)
    given = _Given(rows=results.rows, row_weights=weights, positive_weights=-weights)
    with no_autocast(query):
        wanted = of_query if query_gradient else None, of_key if key_gradient else None
        _gradients(pairs, given, *wanted, unit, fresh=results)
    return of_query, of_key


def _views(view1: Tensor, view2: Tensor, temperature: float) -> _Pairs:
    """The rows of two views against all of them."""
    dtype, views = _multiplied(view1, view2), [view1, view2]
    pairs = _Pairs(views, views, dtype, 1 / temperature, shift=len(view1), leave_out_self=True)
    if _holds_all_keys(pairs, False):  # then a small copy saves half of the launches
        pairs = pairs._replace(keys=[torch.cat([one.to(dtype) for one in views])])
    return pairs


def nt_xent(view1: Tensor, view2: Tensor, temperature: float, reduction: str, gradient: bool) -> tuple[Tensor, Tensor]:
    dtype, gradient = compute_dtype(view1, view2), gradient and reduction != "none"
    pairs = _views(view1, view2, temperature)
    results = _no_results(pairs)
    of_rows = view1.new_empty((len(results.rows), view1.shape[1]) if gradient else 0, dtype=dtype)
    with no_autocast(view1):
        _add_sums(pairs, results)
        if gradient:
            given = _Given(results.rows, results.rows, constants=(1.0, 1.0, -2.0))
            _gradients(pairs, given, of_rows, None)
    return reduce(results.rows - results.of_positives, reduction).to(dtype), of_rows


def nt_xent_gradients(view1: Tensor, view2: Tensor, temperature: float, weights: Tensor) -> Tensor:
    pairs = _views(view1, view2, temperature)
    results, (weights, unit) = _no_results(pairs), in_units(weights)
    of_rows = view1.new_empty((len(weights), view1.shape[1]), dtype=compute_dtype(view1, view2))
    both = -weights - weights.roll(len(view1))
    with no_autocast(view1):
        _add_sums(pairs, results)
        _gradients(pairs, _Given(results.rows, results.rows, weights, weights, both), of_rows, None, unit)
    return of_rows


def _similarities(query: Tensor, key: Tensor, scale: Tensor | None, *options: Tensor) -> _Pairs:
    names = "positives", "query_labels", "key_labels", "excluded"
    given: dict[str, Any] = {name: one for name, one in zip(names, options, strict=True) if one.numel()}
    return _Pairs([query], [key], _multiplied(query, key), factor=scale, **given)


def similarity_logsumexp(
    query: Tensor,
    key: Tensor,
    positives: Tensor,
    query_labels: Tensor,
    key_labels: Tensor,
    excluded: Tensor,
    columns: bool,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    pairs = _similarities(query, key, scale, positives, query_labels, key_labels, excluded)
    results = _no_results(pairs, columns)
    with no_autocast(query):
        _add_sums(pairs, results)
    return results.rows, results.columns, results.of_positives[: len(positives)]


def similarity_logsumexp_gradients(
    query: Tensor,
    key: Tensor,
    positives: Tensor,
    query_labels: Tensor,
    key_labels: Tensor,
    excluded: Tensor,
    rows: Tensor,
    columns: Tensor,
    row_weights: Tensor,
    column_weights: Tensor,
    positive_weights: Tensor,
    query_gradient: bool,
    key_gradient: bool,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    pairs = _similarities(query, key, scale, positives, query_labels, key_labels, excluded)
    of_query = query.new_empty(query.shape if query_gradient else 0, dtype=pairs.sums)
    of_key = key.new_empty(key.shape if key_gradient else 0, dtype=pairs.sums)
    weights, unit = (row_weights, column_weights, positive_weights), None
    if pairs.dtype != pairs.sums:
        joined, unit = in_units(torch.cat(weights))
        weights = joined.split([len(one) for one in weights])
    given = _Given(rows, columns, *weights)
    if query_gradient or key_gradient:
        with no_autocast(query):
            _gradients(pairs, given, of_query if query_gradient else None, of_key if key_gradient else None, unit)
    return of_query, of_key


def sigmoid_loss(
    query: Tensor,
    key: Tensor,
    query_gradient: bool,
    key_gradient: bool,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """With a scale and a bias the gradients in these follow the others."""
    pairs = _Pairs([query], [key], _multiplied(query, key), shift=0, factor=scale)
    wanted = query_gradient or key_gradient
    losses, of_scale, of_bias = query.new_empty((3, len(query)), dtype=torch.float64).unbind()
    of_query = query.new_empty(query.shape if query_gradient else 0, dtype=pairs.sums)
    of_key = key.new_empty(key.shape if key_gradient else 0, dtype=pairs.sums)
    narrow, none = pairs.dtype != pairs.sums, query.new_empty(0)
    rest = query.new_empty((len(query), 1) if narrow else 0, dtype=torch.float32)
    tiles, options = _Tiles(pairs, key_gradient, weights=True), pairs.options()
    factor = WEIGHT_SCALE if narrow else 1.0
    numbers = (losses, of_scale, of_bias) if wanted else (losses, none, none)
    with no_autocast(query):
        for first, some in _pieces(pairs.queries, tiles.rows):
            for first_key, others in _pieces(pairs.keys, tiles.columns):
                products = tiles.products(some, others)
                weights = tiles.weights(products) if wanted else none
                of_tile = pairs.or_empty([bias])[0], factor, weights, rest, *numbers
                _ops.contrastive_sigmoid(products, pairs.place(first, first_key), *options, *of_tile)
                if query_gradient:
                    to_query = of_query[first : first + len(some)]
                    _add_product(to_query, weights, others.to(pairs.dtype), 1 / factor, fresh=first_key == 0)
                if key_gradient:
                    to_key = of_key[first_key : first_key + len(others)]
                    _add_product(to_key, weights.T, some.to(pairs.dtype), 1 / factor, fresh=first == 0)
        for to, others in ((of_query, key), (of_key, query)):
            if len(to) and narrow:
                to.addcmul_(rest, others, value=1 / factor)
            if len(to) and scale is not None:
                to *= scale
    if scale is None:
        return losses.sum(), of_query, of_key
    found = (one.sum() if wanted else torch.zeros_like(scale) for one in (of_scale, of_bias))
    return losses.sum(), of_query, of_key, *found


# Those with a scale, which have no schema for the CPU: there the rows are scaled before.
_OPTIONS = "Tensor positives, Tensor query_labels, Tensor key_labels, Tensor excluded"
SCHEMAS = {
    "scaled_similarity_logsumexp": f"(Tensor query, Tensor key, {_OPTIONS}, bool columns, Tensor scale)"
    " -> (Tensor, Tensor, Tensor)",
    "scaled_similarity_logsumexp_gradients": f"(Tensor query, Tensor key, {_OPTIONS}, Tensor rows, Tensor columns,"
    " Tensor row_weights, Tensor column_weights, Tensor positive_weights, bool query_gradient, bool key_gradient,"
    " Tensor scale) -> (Tensor, Tensor)",
    "scaled_sigmoid_loss": "(Tensor query, Tensor key, bool query_gradient, bool key_gradient, Tensor scale,"
    " Tensor bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
OPERATORS = {
    one.__name__: one
    for one in (
        *(info_nce, info_nce_gradients, nt_xent, nt_xent_gradients),
        *(similarity_logsumexp, similarity_logsumexp_gradients, sigmoid_loss),
    )
}
OPERATORS |= {name: OPERATORS[name.removeprefix("scaled_")] for name in SCHEMAS}
