"""What the CUDA kernels must compute before they serve: small fixed inputs, and the references' results for them.

A case calls a compiled operator with tensors of one dtype and the reference with the same tensors in float64. The sizes
are ragged, and chosen so that each kernel, each precision and each layout of csrc/cuda/README.md that small inputs can
reach has a case: several tiles, blocks, problems and parts, the last of each not full.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedkernels.internal.contrastive_one_tile import Loss, value
from fedkernels.reference.client_weights import client_weights
from fedkernels.reference.clip_loss import clip_loss
from fedkernels.reference.info_nce import info_nce
from fedkernels.reference.linear_cka import linear_cka, linear_cka_pairwise, linear_cka_to_kernel
from fedkernels.reference.nt_xent import nt_xent
from fedkernels.reference.sigmoid_loss import sigmoid_loss
from fedkernels.reference.similarity_logsumexp import similarity_logsumexp
from fedkernels.reference.supervised_contrastive_loss import supervised_contrastive_loss
from fedkernels.reference.two_views import two_views, view_parameters
from fedkernels.view_options import ViewKey, ViewOptions

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_FLOATING = (_BF16, _FP16, _FP32, _FP64)
# The precision of sums whose inputs are exact, relative to the largest entry of a result.
_OF_SUMS = {_BF16: 1e-5, _FP16: 1e-5, _FP32: 1e-5, _FP64: 1e-12}
_ops = torch.ops.fedkernels

Function = Callable[..., Sequence[Tensor]]


class Case(NamedTuple):
    """Inputs of an operator, and what it must give for them."""

    name: str  # begins with the dtype of the inputs
    inputs: list[Tensor]  # on the CPU
    kernel: Function  # takes the inputs on the GPU
    reference: Function  # takes the same in float64; integers stay what they are
    tolerance: float  # of the first result, relative to its largest entry
    tolerance_of_others: float | None = None  # of the other results, usually gradients; None: the same


def cases_of(operator: str, allow_tf32: bool = False) -> Iterator[Case]:
    """The cases of an operator of `fedkernels.internal.native.CUDA`.

    Args:
        operator: its name.
        allow_tf32: may torch multiply float32 matrices in tf32? Those of a linear CKA and of the contrastive losses are
            torch's products.
    """
    products = 5e-3 if allow_tf32 else 1e-5
    cases: Iterator[Case] = {
        "client_weights": _client_weights,
        "info_nce": lambda: _info_nce(products),
        "linear_cka": lambda: _linear_cka(products),
        "linear_cka_pairwise": lambda: _linear_cka_pairwise(products),
        "linear_cka_to_kernel": lambda: _linear_cka_to_kernel(products),
        "nt_xent": lambda: _nt_xent(products),
        "sigmoid_loss": lambda: _sigmoid_loss(products),
        "similarity_logsumexp": lambda: _similarity_logsumexp(products),
        "two_views": _two_views,
        "unbalanced_ot": _unbalanced_ot,
    }[operator]()
    return cases


def difference(case: Case, results: Sequence[Tensor], truths: Sequence[Tensor]) -> str:
    """What is wrong with the results, or ""."""
    for index, (result, truth) in enumerate(zip(results, truths, strict=True)):
        result, truth = result.cpu(), truth.cpu().to(_FP64)
        where = f"result {index + 1} of {len(truths)}"
        if result.shape != truth.shape:
            return f"{where} has shape {list(result.shape)}, expected {list(truth.shape)}"
        of_others = case.tolerance if case.tolerance_of_others is None else case.tolerance_of_others
        tolerance = of_others if index else case.tolerance
        largest = float(truth.abs().max())
        # An entry is rounded to its dtype, by half of its own last place.
        of_dtype = torch.finfo(result.dtype)
        rounding = (of_dtype.eps * truth.abs()).clamp(min=of_dtype.smallest_normal * of_dtype.eps) / 2
        error = float(((result.to(_FP64) - truth).abs() - rounding).max())
        if not error <= tolerance * largest:  # NaN is wrong, too
            return (
                f"{where} is off by {error / largest if largest else error:.1e} of its largest entry, "
                f"expected at most {tolerance:.1e}"
            )
    return ""


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=_FP64)


def _name(dtype: torch.dtype, *details: str) -> str:
    return ", ".join([str(dtype).removeprefix("torch."), *details])


def _with_gradients(function: Callable[..., Tensor], wanted: int | None = None) -> Function:
    """The function's value and its gradients in all tensors, or in the first `wanted`."""

    def call(*tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:wanted]]
        value = function(*leaves, *tensors[len(leaves) :])
        # Each entry counts differently, so that an exchange of two is seen.
        weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
        return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]

    return call


# The contrastive losses


def _contrastive_inputs(rows: int, more: int, width: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose logits grow with the key's number, so that sums are scaled again on the way."""
    queries, keys = _randn(rows, width, seed=1), _randn(more, width, seed=2)
    keys[:rows] += queries[:more]
    return queries / width**0.5, keys * torch.linspace(0.3, 1.2, more, dtype=_FP64)[:, None] / width**0.5


# By dtype what the gradients may be off by: their weights are rounded to 16 bits where the inputs have them. The
# positives' rounding is made good. Where it is not, cases of many keys show it, whose other weights are small.
_OF_MANY_KEYS, _MANY_KEYS = 3e-4, 300
_OF_GRADIENTS = {_BF16: 1e-3, _FP16: 3e-4, _FP32: 1e-5, _FP64: 1e-12}
_TEMPERATURE = 0.2
_EVEN_WIDTHS = (64, 128, 256, 512)  # the usual ones, whose rows need no padding


def _contrastive_case(
    name: str,
    inputs: Sequence[Tensor],
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    products: float,
    gradients: int = 2,
) -> Iterator[Case]:
    """In each dtype. `products`: the precision of torch's products in float32."""
    for dtype in _FLOATING:
        of_losses, of_gradients = _OF_SUMS[dtype], _OF_GRADIENTS[dtype]
        if len(inputs) <= 3 and len(inputs[0]) < _MANY_KEYS <= len(inputs[1]):
            of_gradients = min(of_gradients, _OF_MANY_KEYS)
        if dtype == _FP32:
            of_losses = of_gradients = products
        floating = [one.to(dtype) if one.is_floating_point() else one for one in inputs]
        by_kernel, by_reference = (_with_gradients(function, gradients) for function in (kernel, reference))
        yield Case(_name(dtype, name), floating, by_kernel, by_reference, of_losses, of_gradients)


def _in_one_tile(
    loss: Loss, sizes: tuple[int, int, int], numbers: Sequence[float], reference: Callable[..., Tensor], products: float
) -> Iterator[Case]:
    """Cases with a scale, or a temperature, and perhaps a bias, which get their gradients."""
    yield from _contrastive_case(
        f"{sizes[0]} x {sizes[1]} x {sizes[2]} in one tile, {loss.name}",
        [*_contrastive_inputs(*sizes), *torch.tensor(numbers, dtype=_FP64).unbind()],
        lambda query, key, *numbers: value(loss, query, key, *numbers),
        reference,
        products,
        2 + len(numbers),
    )


def _info_nce(products: float) -> Iterator[Case]:
    loss = Loss("info_nce", divides=True)
    for sizes in ((37, 300, 43), (1, 5, 8)):
        yield from _in_one_tile(loss, sizes, [_TEMPERATURE], lambda q, k, t: info_nce(q, k, t, "sum"), products)
    # One gradient: by the kernel that forms its products itself, in each of its widths. 600 keys: joined parts.
    for rows, keys, width, reduction, key_gradient in (
        (37, 300, 40, "mean", True),
        (19, 70, 43, "none", True),
        (37, 600, 43, "sum", False),
        (9, 20, 100, "mean", False),
        (130, 140, 200, "none", False),
        *((9, 20, width, "mean", key_gradient) for width in _EVEN_WIDTHS for key_gradient in (True, False)),
    ):
        yield from _contrastive_case(
            f"{rows} x {keys} x {width}, {reduction}, {1 + key_gradient} gradients",
            _contrastive_inputs(rows, keys, width),
            _info_nce_kernel(reduction, key_gradient),
            _of_reference(info_nce, reduction),
            products,
            1 + key_gradient,
        )
    query, key = _contrastive_inputs(9, 20, 40)
    yield Case(
        _name(_BF16, "keys of float16"),
        [query.to(_BF16), key.to(_FP16)],
        _with_gradients(_info_nce_kernel("mean", True)),
        _with_gradients(_of_reference(info_nce, "mean")),
        products,
    )


def _info_nce_kernel(reduction: str, key_gradient: bool) -> Callable[..., Tensor]:
    def loss(query: Tensor, key: Tensor) -> Tensor:
        value: Tensor = _ops.info_nce(query, key, _TEMPERATURE, reduction, True, key_gradient)[0]
        return value

    return loss


def _nt_xent(products: float) -> Iterator[Case]:
    yield from _contrastive_case(
        "2 x 37 x 43 in one tile",
        [*_contrastive_inputs(37, 37, 43), torch.tensor(_TEMPERATURE, dtype=_FP64)],
        lambda view1, view2, temperature: value(
            Loss("nt_xent", symmetric=True, shift=37, divides=True), torch.cat([view1, view2]), None, temperature
        ),
        lambda view1, view2, temperature: nt_xent(view1, view2, temperature, "sum"),
        products,
        3,
    )
    for rows, width, reduction in (
        *((150, 40, "mean"), (37, 43, "none"), (9, 300, "sum")),
        *((9, width, "mean") for width in _EVEN_WIDTHS),
    ):
        yield from _contrastive_case(
            f"2 x {rows} x {width}, {reduction}",
            _contrastive_inputs(rows, rows, width),
            lambda view1, view2, reduction=reduction: _ops.nt_xent(view1, view2, _TEMPERATURE, reduction, True)[0],
            _of_reference(nt_xent, reduction),
            products,
        )


def _of_reference(loss: Callable[..., Tensor], reduction: str) -> Callable[..., Tensor]:
    return lambda first, second: loss(first, second, _TEMPERATURE, reduction)


def _similarity_logsumexp(products: float) -> Iterator[Case]:
    clip = Loss("clip_loss", of_rows=0.5, of_columns=0.5)
    yield from _in_one_tile(clip, (37, 37, 43), [3.0], lambda p, q, scale: clip_loss(p, q, scale, "sum"), products)
    yield from _contrastive_case(
        "300 x 43 in one tile, labels",
        [_contrastive_inputs(300, 300, 43)[1], torch.tensor(_TEMPERATURE, dtype=_FP64), torch.arange(300) ** 2 % 101],
        lambda rows, temperature, labels: value(
            Loss("supervised_contrastive_loss", symmetric=True, divides=True, divisor=0.0),
            *(rows, None, temperature),
            classes=labels,
        ),
        lambda rows, temperature, labels: supervised_contrastive_loss(rows, labels, temperature),
        products,
    )
    numbers = torch.arange(300)
    excluded = numbers[:37, None] % 7 == numbers % 5
    inputs = [*_contrastive_inputs(37, 300, 43), numbers[:37] * 3 % 50, numbers[:37] % 11, numbers % 9, excluded]

    def of_reference(query: Tensor, key: Tensor, positives: Tensor, *left_out: Tensor) -> Tensor:
        return torch.cat(similarity_logsumexp(0.7 * query, key, positives, left_out[:2], left_out[2]))  # type: ignore[arg-type]

    yield from _contrastive_case(
        "37 x 300 x 43, all options",
        inputs,
        lambda query, *others: torch.cat(
            _ops.scaled_similarity_logsumexp(query, *others, True, query.new_full((), 0.7, dtype=_FP64))
        ),
        of_reference,
        products,
    )


def _sigmoid_loss(products: float) -> Iterator[Case]:
    one_tile = Loss("sigmoid_loss")

    def in_sum(query: Tensor, key: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return sigmoid_loss(query, key, scale, bias, "sum")

    yield from _in_one_tile(one_tile, (37, 37, 43), [3.0, -4.0], in_sum, products)
    yield from _contrastive_case(
        "300 x 300 x 43",
        _contrastive_inputs(300, 300, 43),
        lambda query, key: _ops.scaled_sigmoid_loss(
            query, key, True, True, *query.new_tensor([0.7, -4.0], dtype=_FP64).unbind()
        )[0],
        lambda query, key: sigmoid_loss(query, key, 0.7, -4.0, "sum"),
        products,
    )


# Linear CKA


def _representations(rows: int, *widths: int, batch: int = 2) -> list[Tensor]:
    """Of the same samples, not centred."""
    common = _randn(batch, rows, max(widths), seed=rows)
    return [common[..., :width] + _randn(batch, rows, width, seed=width) + 0.3 for width in widths]


def _first(operator: Any, *options: bool) -> Callable[..., Tensor]:
    def value(*tensors: Tensor) -> Tensor:
        first: Tensor = operator(*tensors, *options)[0]
        return first

    return value


def _linear_cka_case(dtype: torch.dtype, sizes: tuple[int, int, int], *options: Any) -> Case:
    centered, gradients, tolerance = options
    rows, *widths = sizes
    details = f"2 x {rows} x {widths}, {'' if centered else 'not '}centred, {gradients} gradients"
    return Case(
        _name(dtype, details),
        [tensor.to(dtype) for tensor in _representations(rows, *widths)],
        _with_gradients(_first(_ops.linear_cka, centered, gradients > 0, gradients > 1), gradients),
        _with_gradients(lambda x, y: linear_cka(x, y, centered), gradients),
        tolerance,
        10 * tolerance,  # two terms of a gradient nearly cancel
    )


def _of_large_entries(case: Case) -> Case:
    """Their products leave the range of float32 unless they are scaled."""
    return case._replace(name=f"{case.name}, large entries", inputs=[1e25 * tensor for tensor in case.inputs])


def _linear_cka(tolerance: float) -> Iterator[Case]:
    for dtype in _FLOATING:
        precision = 1e-12 if dtype == _FP64 else tolerance
        for sizes, *options in (
            ((300, 60, 70), True, 2),
            ((300, 60, 140), False, 1),
            ((45, 150, 140), False, 2),
            ((45, 40, 30), True, 2),
        ):
            yield _linear_cka_case(dtype, sizes, *options, precision)
    yield _of_large_entries(_linear_cka_case(_FP32, (140, 33, 12), True, 2, tolerance))


def _linear_cka_to_kernel(tolerance: float) -> Iterator[Case]:
    for dtype in _FLOATING:
        precision = 1e-12 if dtype == _FP64 else tolerance
        for rows, width, centered in ((70, 9, False), (140, 9, True), (30, 140, True), (30, 40, False)):
            x, y = _representations(rows, width, 20)
            options = centered, True
            yield Case(
                _name(dtype, f"2 x {rows} x {width}, {'' if centered else 'not '}centred"),
                [x.to(dtype), (y @ y.mT).to(dtype)],
                _with_gradients(_first(_ops.linear_cka_to_kernel, *options), 1),
                _with_gradients(lambda x, kernel, centered=centered: linear_cka_to_kernel(x, kernel, centered), 1),
                precision,
                20 * precision,
            )


def _linear_cka_pairwise(tolerance: float) -> Iterator[Case]:
    some = [tensor[0] for tensor in _representations(150, 9, 140, 33, batch=1)]
    many = [_randn(9, 1 + n % 3, seed=n) + 0.3 for n in range(19)]  # more than one call takes
    for dtype in _FLOATING:
        for details, matrices, others, centered in (
            ("3 with 2, centred", some, 2, True),
            ("3 with themselves", some, 0, False),
            ("19 with themselves, centred", many, 0, True),
        ):
            yield Case(
                _name(dtype, details),
                [matrix.to(dtype) for matrix in matrices],
                lambda *xs, n=others, c=centered: [_ops.linear_cka_pairwise(xs, xs[:n], c)],
                lambda *xs, n=others, c=centered: [linear_cka_pairwise(xs, xs[: n or None], c)],
                1e-12 if dtype == _FP64 else tolerance,
            )


# Transport, and the server's side


def _unbalanced_ot() -> Iterator[Case]:
    # Up to 128 x 128 a block solves a problem, the largest of which do not fit into shared memory. Above several do.
    for dtype in _FLOATING:
        yield _transport_case(dtype, (3, 30, 20), "accelerated", 1e-7)
        if dtype in (_FP32, _FP64):  # the halves are widened before
            yield _transport_case(dtype, (1, 12, 100), "accelerated", 1e-7)
            yield _transport_case(dtype, (2, 11, 130), "accelerated", 1e-6 if dtype == _FP32 else 1e-4)
    yield _transport_case(_FP32, (1, 128, 128), "accelerated", 1e-2)
    for shape in ((2, 12, 9), (1, 9, 130)):
        yield _transport_case(_FP32, shape, "steepest", 1e-2)


def _transport_case(dtype: torch.dtype, shape: tuple[int, int, int], method: str, tol: float) -> Case:
    cost = (2 * _randn(*shape, seed=3)).sigmoid()
    masses = [1 + 0.3 * _randn(shape[0], size, seed=size).tanh() for size in shape[1:]]
    options = 0.8, 0.9, tol, 800, method  # about twice the iterations that are needed
    return Case(
        _name(dtype, f"{list(shape)}, {method}"),
        [tensor.to(dtype) for tensor in (cost, *masses)],
        lambda cost, a, b: _transport_by_kernel(cost, a, b, options),
        _transport_on_the_cpu,
        10 * tol,  # of the value
        6 * tol**0.5,  # of the plan's sums, which follow the root of the gap
    )


def _transport_by_kernel(cost: Tensor, a: Tensor, b: Tensor, options: tuple[Any, ...]) -> list[Tensor]:
    plan, u, v, value, mass, _, _ = _ops.unbalanced_ot(cost, a, b, *options)
    return [value, mass, u, v, plan.sum(-1), plan.sum(-2), (plan * cost).sum((-2, -1))]


def _transport_on_the_cpu(cost: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    """By the kernel for the CPU, which is another one and proves its gap: the reference takes 200,000 small steps."""
    plan, u, v, value, mass, _, gap = _ops.unbalanced_ot(cost, a, b, 0.8, 0.9, 1e-12, 1000, "interior_point")
    assert bool((gap <= 1e-12).all()), "the solver on the CPU has not converged"
    return [value, mass, u, v, plan.sum(-1), plan.sum(-2), (plan * cost).sum((-2, -1))]


def _client_weights() -> Iterator[Case]:
    for dtype in _FLOATING:
        for clients, problems in ((9, 2), (40, 1))[: 2 if dtype in (_FP32, _FP64) else 1]:
            updates = _randn(problems, clients, 4 * clients, seed=clients)
            updates *= torch.linspace(0.5, 2, clients, dtype=_FP64)[:, None]
            updates += _randn(problems, 1, 4 * clients)
            if clients == 9:
                updates[1, 3] = updates[1, 5]  # equal clients share
            yield Case(
                _name(dtype, f"{problems} x {clients} clients"),
                [(updates @ updates.mT / clients).to(dtype)],
                lambda gram: [_ops.client_weights(gram, 1e-8)],
                lambda gram: [client_weights(gram, tol=1e-8)],
                1e-9 if dtype == _FP64 and clients > 9 else 1e-6,
            )


# Views


_VIEW_KEY = ViewKey(seed=5, client=3, round=7, epoch=1)
_VIEW_OPTIONS = ViewOptions(solarize=0.3, hue=0.5, blur=0.6)


def _two_views() -> Iterator[Case]:
    for dtype, tolerance in ((_FP32, 2e-5), (_BF16, 5e-3)):
        # The last image does not fit into shared memory.
        for shape in ((12, 3, 20, 35), (7, 1, 28, 28), (2, 3, 96, 128)):
            channels_last = dtype == _BF16
            generator = torch.Generator().manual_seed(0)
            yield Case(
                _name(dtype, f"{list(shape)}{', channels last' * channels_last}"),
                [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8), torch.arange(9, 9 + shape[0])],
                lambda images, samples, dtype=dtype, last=channels_last: list(
                    _ops.two_views(images, samples, *_VIEW_KEY, _VIEW_OPTIONS.numbers(), dtype == _BF16, last)
                ),
                _views_by_reference,
                tolerance,
            )


def _views_by_reference(images: Tensor, samples: Tensor) -> list[Tensor]:
    height, width = images.shape[2:]
    drawn = view_parameters(samples, _VIEW_KEY, height, width, _VIEW_OPTIONS)
    return list(two_views(images, drawn, _VIEW_OPTIONS))
