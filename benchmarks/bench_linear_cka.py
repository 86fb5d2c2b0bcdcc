"""Linear CKA, forward and backward: two representations, many small pairs, all pairs of layers, a given kernel.

float32. The representations are random features of a shared low-dimensional signal behind a ReLU, as layers are. A
product of a matrix with itself is symmetric: the floor counts it half, as the product of half of the rows.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work, in_float64, value_and_gradients
from fedkernels import linear_cka, linear_cka_pairwise, linear_cka_to_kernel

EAGER = "eager, feature space"
GRAM = "eager, centred Gram matrices"
TORCH_CKA = "torch_cka"
BMM = "eager bmm"
LOOP = "eager loop"
TRACE = "eager tr(X'KX)"
COMPILED = "torch.compile"


def cases(quick: bool) -> tuple[Case, ...]:
    samples, width = (64, 16) if quick else (5000, 512)
    pairs, pair_samples, pair_width = (4, 32, 8) if quick else (256, 256, 128)
    widths, layer_samples = ([4, 8, 16, 32], 64) if quick else (6 * [64] + 6 * [128] + 6 * [256] + 6 * [512], 2000)
    rank = 24 if quick else 1280
    return (
        _two(samples, width, centered=False),
        _two(samples, width, centered=True),
        _forward(samples, width),
        _many(pairs, pair_samples, pair_width),
        _pairwise(widths, layer_samples),
        _to_kernel(samples, width, rank),
        _to_factors(samples, width, rank),
    )


CURVE = "samples"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of samples: two centred representations of 512 dimensions."""
    width, sizes = (16, (32, 64)) if quick else (512, (250, 1000, 5000))
    return {samples: _two(samples, width, centered=True) for samples in sizes}


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    sizes = ((3, 20, 8),) if quick else ((256, 256, 128), (256, 128, 64), (256, 64, 32))
    return (
        *(_many_on_gpu(pairs, samples, width) for pairs, samples, width in sizes),
        _two_on_gpu(*((40, 8) if quick else (5000, 512)), compiled=not quick),
    )


def _representation(samples: int, width: int, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
    """On the generator's device."""
    device = generator.device
    signal = torch.randn(*batch, samples, 32, generator=torch.Generator(device).manual_seed(0), device=device)
    return torch.relu(signal @ torch.randn(*batch, 32, width, generator=generator, device=device) / math.sqrt(32))


# Two representations


def _two(samples: int, width: int, *, centered: bool) -> Case:
    ours = Implementation("fedkernels.linear_cka", partial(_ours, centered=centered))
    eager = Implementation(EAGER, partial(_eager, centered=centered), note="|y'x|^2 / (|x'x| |y'y|)")
    peers: tuple[Implementation, ...] = (eager,)
    bars: tuple[Bar, ...] = (Bar(faster_than=(EAGER,), times=1.1),)
    if centered:
        peers += (
            Implementation(GRAM, _gram, note="<HKH, HLH> / (|HKH| |HLH|)"),
            Implementation(
                TORCH_CKA,
                _torch_cka,
                package="torch_cka",
                note="CKA.compare on stored features: the unbiased estimate, forward alone",
                same_result=False,
            ),
        )
        bars += (Bar(faster_than=(GRAM, TORCH_CKA), times=10.0),)
    return Case(
        size=f"L = {samples}, d = {width}, {'centred, ' if centered else ''}both gradients",
        inputs=partial(_two_inputs, samples, width),
        tiny=partial(_two_inputs, 64, 32),
        implementations=(ours, *peers),
        truth=lambda inputs: _eager(in_float64(inputs), centered=centered),
        floor=Floor("x'x and y'y at half, y'x, and four products of L x d x d for the gradients", _two_floor),
        bars=bars,
    )


def _forward(samples: int, width: int) -> Case:
    """Without gradients, as CKAAccumulator works (bench_accumulate_cka)."""
    return Case(
        size=f"L = {samples}, d = {width}, centred, forward",
        inputs=lambda device: {name: z.detach() for name, z in _two_inputs(samples, width, device).items()},
        tiny=lambda device: {name: z.detach() for name, z in _two_inputs(64, 32, device).items()},
        implementations=(
            Implementation(
                "fedkernels.linear_cka",
                lambda inputs: {"value": linear_cka(inputs["x"], inputs["y"], centered=True)},
            ),
            Implementation(EAGER, _eager_value, note="|y'x|^2 / (|x'x| |y'y|)"),
        ),
        truth=lambda inputs: _eager_value(in_float64(inputs)),
        bars=(Bar(faster_than=(EAGER,), times=1.1),),
    )


def _eager_value(inputs: Inputs) -> Outputs:
    x, y = (z - z.mean(dim=-2, keepdim=True) for z in (inputs["x"], inputs["y"]))
    return {"value": _feature_space(x, y)}


def _two_inputs(samples: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    return {name: _representation(samples, width, generator).requires_grad_() for name in ("x", "y")}


def _gradients(value: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(value.sum(), {"x": inputs["x"], "y": inputs["y"]}) | {"value": value.detach()}


def _ours(inputs: Inputs, centered: bool = False) -> Outputs:
    return _gradients(linear_cka(inputs["x"], inputs["y"], centered=centered), inputs)


def _feature_space(x: Tensor, y: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm
    return norm(y.mT @ x).square() / (norm(x.mT @ x) * norm(y.mT @ y))


def _eager(inputs: Inputs, centered: bool = False, formula: Callable[..., Tensor] = _feature_space) -> Outputs:
    x, y = inputs["x"], inputs["y"]
    if centered:
        x, y = x - x.mean(dim=-2, keepdim=True), y - y.mean(dim=-2, keepdim=True)
    return _gradients(formula(x, y), inputs)


def _gram(inputs: Inputs) -> Outputs:
    def centred(x: Tensor) -> Tensor:
        gram = x @ x.T
        gram = gram - gram.mean(dim=0)
        return gram - gram.mean(dim=1, keepdim=True)

    k, l = centred(inputs["x"]), centred(inputs["y"])
    return _gradients((k * l).sum() / (torch.linalg.matrix_norm(k) * torch.linalg.matrix_norm(l)), inputs)


class _Stored(nn.Module):
    """A network whose layers give stored features, for the hooks of torch_cka."""

    def __init__(self, features: list[Tensor]) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.ModuleList(nn.Identity() for _ in features)

    def forward(self, batch: Tensor) -> Tensor:
        for layer, features in zip(self.layers, self.features, strict=True):
            layer(features)
        return batch


def _compare(xs: list[Tensor], ys: list[Tensor]) -> Outputs:
    layers = [[f"layers.{index}" for index in range(len(features))] for features in (xs, ys)]
    networks = [_Stored([features.detach() for features in one]) for one in (xs, ys)]
    cka = importlib.import_module("torch_cka").CKA(*networks, "first", "second", *layers)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1, 1)))
    with torch.no_grad():
        cka.compare(loader, loader)
    return {"unbiased estimate": cka.hsic_matrix}


def _torch_cka(inputs: Inputs) -> Outputs:
    return _compare([inputs["x"]], [inputs["y"]])


def _two_floor(inputs: Inputs) -> Callable[[], None]:
    x, y = inputs["x"].detach(), inputs["y"].detach()
    half = x.shape[-2] // 2

    def products() -> None:
        small = torch.matmul(x[..., :half, :].mT, x[..., :half, :])
        small = torch.matmul(y[..., :half, :].mT, y[..., :half, :], out=small)
        torch.matmul(y.mT, x, out=small)
        large = torch.matmul(x, small)
        for z in (y, x, y):
            torch.matmul(z, small, out=large)

    return products


# Many small pairs


def _many(pairs: int, samples: int, width: int) -> Case:
    return Case(
        size=f"{pairs} pairs, L = {samples}, d = {width}, both gradients",
        inputs=partial(_many_inputs, pairs, samples, width),
        tiny=partial(_many_inputs, 2, 64, 32),
        implementations=(
            Implementation("fedkernels.linear_cka", _ours),
            Implementation(BMM, _eager, note="the feature-space formula on the batch"),
            Implementation(LOOP, _loop, note="the feature-space formula pair by pair"),
        ),
        truth=lambda inputs: _eager(in_float64(inputs)),
        floor=Floor("as for one pair, by batched products", _two_floor),
        bars=(Bar(faster_than=(BMM,), times=2.0),),
    )


def _many_inputs(pairs: int, samples: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    return {name: _representation(samples, width, generator, (pairs,)).requires_grad_() for name in ("x", "y")}


def _loop(inputs: Inputs) -> Outputs:
    values = [_feature_space(x, y) for x, y in zip(inputs["x"].unbind(), inputs["y"].unbind(), strict=True)]
    return _gradients(torch.stack(values), inputs)


# On a GPU


def _many_on_gpu(pairs: int, samples: int, width: int) -> Case:
    return Case(
        size=f"float32, {pairs} pairs, L = {samples}, d = {width}, both gradients",
        inputs=partial(_many_inputs, pairs, samples, width),
        implementations=(
            Implementation("fedkernels.linear_cka", _ours),
            Implementation(BMM, _eager, note="the feature-space formula on the batch"),
        ),
        truth=lambda inputs: _eager(in_float64(inputs)),
        work=Work(
            pairs * 12.0 * samples * width * width,
            "fp32",
            "x'x and y'y at half, y'x, and four products of L x d x d for the gradients",
        ),
        bars=(Bar(faster_than=(BMM,), times=1.1),),
    )


def _two_on_gpu(samples: int, width: int, *, compiled: bool) -> Case:
    peers = [Implementation(EAGER, _eager, note="|y'x|^2 / (|x'x| |y'y|)")]
    if compiled:
        formula = torch.compile(_feature_space, dynamic=False)
        peers.append(Implementation(COMPILED, partial(_eager, formula=formula), note="of the same"))
    return Case(
        size=f"float32, one pair, L = {samples}, d = {width}, both gradients",
        inputs=partial(_two_inputs, samples, width),
        implementations=(Implementation("fedkernels.linear_cka", _ours), *peers),
        truth=lambda inputs: _eager(in_float64(inputs)),
        work=Work(
            14.0 * samples * width * width,
            "fp32",
            "x'x, y'y, y'x, and four products of L x d x d for the gradients",
        ),
        bars=(Bar(faster_than=(EAGER,), times=1.0),),
    )


# All pairs of layers


def _pairwise(widths: list[int], samples: int) -> Case:
    layers = len(widths)
    return Case(
        size=f"{layers} x {layers} layers of {min(widths)} to {max(widths)}, L = {samples}, centred, forward",
        inputs=partial(_layers, widths, samples),
        tiny=partial(_layers, [16, 32], 64),
        implementations=(
            Implementation("fedkernels.linear_cka_pairwise", _ours_pairwise),
            Implementation(
                TORCH_CKA,
                _torch_cka_row,
                package="torch_cka",
                note="CKA.compare on stored features, one layer against all, times the number of layers; unbiased",
                same_result=False,
                scale=lambda inputs: len(inputs["xs"]),
            ),
            Implementation(LOOP, _pairwise_loop, note="feature space, each layer's own norm once"),
        ),
        truth=lambda inputs: _pairwise_loop({name: [z.double() for z in zs] for name, zs in inputs.items()}),
        floor=Floor("X'Y of all columns in one torch.mm, and each layer's own product at half", _pairwise_floor),
        bars=(Bar(faster_than=(TORCH_CKA,), times=50.0),),
    )


def _layers(widths: list[int], samples: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    return {name: [_representation(samples, width, generator) for width in widths] for name in ("xs", "ys")}


def _ours_pairwise(inputs: Inputs) -> Outputs:
    return {"value": linear_cka_pairwise(inputs["xs"], inputs["ys"], centered=True)}


def _torch_cka_row(inputs: Inputs) -> Outputs:
    # Every layer of the first network costs the same: L x L products, whatever its width.
    return _compare(inputs["xs"][:1], inputs["ys"])


def _pairwise_loop(inputs: Inputs) -> Outputs:
    norm = torch.linalg.matrix_norm
    xs, ys = ([z - z.mean(dim=0) for z in inputs[name]] for name in ("xs", "ys"))
    x_norms, y_norms = (torch.stack([norm(z.T @ z) for z in zs]) for zs in (xs, ys))
    cross = torch.stack([norm(y.T @ x).square() for x in xs for y in ys]).view(len(xs), len(ys))
    return {"value": cross / (x_norms[:, None] * y_norms)}


def _pairwise_floor(inputs: Inputs) -> Callable[[], None]:
    x, y = (torch.cat(inputs[name], dim=1) for name in ("xs", "ys"))
    cross = torch.empty(x.shape[1], y.shape[1])

    def products() -> None:
        torch.mm(x.T, y, out=cross)
        for z in inputs["xs"]:
            torch.mm(z.T, z)

    return products


# A given kernel


def _to_kernel(samples: int, width: int, rank: int) -> Case:
    return Case(
        size=f"to a kernel, L = {samples}, d = {width}, gradient in x",
        inputs=partial(_kernel_inputs, samples, width, rank),
        tiny=partial(_kernel_inputs, 64, 32, 8),
        implementations=(
            Implementation("fedkernels.linear_cka_to_kernel", _ours_to_kernel),
            Implementation(TRACE, _trace, note="<x, Kx> / (|x'x| |K|)"),
        ),
        truth=lambda inputs: _trace(in_float64(inputs)),
        floor=Floor("Kx, x'x at half, and one product of L x d x d for the gradient", _kernel_floor),
        bars=(Bar(faster_than=(TRACE,), times=1.1),),
    )


def _to_factors(samples: int, width: int, rank: int) -> Case:
    return Case(
        size=f"to a kernel of rank {rank} by its factor, L = {samples}, d = {width}, gradient in x",
        inputs=partial(_kernel_inputs, samples, width, rank),
        tiny=partial(_kernel_inputs, 64, 32, 8),
        implementations=(
            Implementation("fedkernels.linear_cka", _ours_to_factor, note="K = FF': linear_cka(x, F)"),
            Implementation(TRACE, _trace, note="<x, Kx> / (|x'x| |K|), with the kernel formed before"),
            Implementation(EAGER, _eager_to_factor, note="|F'x|^2 / (|x'x| |F'F|)"),
        ),
        truth=lambda inputs: _eager_to_factor(in_float64(inputs)),
        floor=Floor("F'x, F(F'x), F'F and x'x at half, and one product of L x d x d for the gradient", _factor_floor),
        bars=(Bar(faster_than=(TRACE,), times=2.0),),
    )


def _kernel_inputs(samples: int, width: int, rank: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    x, factor = (_representation(samples, columns, generator) for columns in (width, rank))
    return {"x": x.requires_grad_(), "factor": factor, "kernel": factor @ factor.T}


def _gradient(value: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(value, {"x": inputs["x"]})


def _ours_to_kernel(inputs: Inputs) -> Outputs:
    return _gradient(linear_cka_to_kernel(inputs["x"], inputs["kernel"]), inputs)


def _ours_to_factor(inputs: Inputs) -> Outputs:
    return _gradient(linear_cka(inputs["x"], inputs["factor"]), inputs)


def _trace(inputs: Inputs) -> Outputs:
    x, kernel, norm = inputs["x"], inputs["kernel"], torch.linalg.matrix_norm
    return _gradient((x * (kernel @ x)).sum() / (norm(x.T @ x) * norm(kernel)), inputs)


def _eager_to_factor(inputs: Inputs) -> Outputs:
    return _gradient(_feature_space(inputs["x"], inputs["factor"]), inputs)


def _kernel_floor(inputs: Inputs) -> Callable[[], None]:
    x, kernel = inputs["x"].detach(), inputs["kernel"]
    half = len(x) // 2

    def products() -> None:
        large = torch.mm(kernel, x)
        torch.mm(x, torch.mm(x[:half].T, x[:half]), out=large)

    return products


def _factor_floor(inputs: Inputs) -> Callable[[], None]:
    x, factor = inputs["x"].detach(), inputs["factor"]
    half = len(x) // 2

    def products() -> None:
        large = torch.mm(factor, torch.mm(factor.T, x))
        torch.mm(factor[:half].T, factor[:half])
        torch.mm(x, torch.mm(x[:half].T, x[:half]), out=large)

    return products
