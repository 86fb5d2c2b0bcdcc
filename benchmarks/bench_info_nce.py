"""InfoNCE, forward and backward: B queries against N = B keys, rows of norm 1, temperature 0.2; float32 on the CPU."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work, value_and_gradients
from fedkernels import info_nce
from fedkernels.internal import contrastive_cuda

TEMPERATURE = 0.2
NAIVE = "naive cross-entropy"
CHUNKED = "F.linear_cross_entropy, chunked"
WHOLE = "F.linear_cross_entropy, whole"
# torch 2.11 lacks it, and no package of this name is installed anywhere
NEEDED = "" if hasattr(F, "linear_cross_entropy") else "torch with linear_cross_entropy"
COMPILED = "torch.compile"
INF_CL = "Inf-CL, Triton"
LIGER = "Liger, fused linear cross entropy"
OURS = "fedkernels.info_nce"
MEMORY_BAR = 16 / 4096  # MiB beyond the outputs per query: 16 MiB at B = 4096


def cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (96, 16) if quick else (4096, 256)
    linear_cross_entropy = (CHUNKED, WHOLE)
    made = [
        _case(
            rows,
            width,
            keys_learn=False,
            bars=(
                Bar(faster_than=(NAIVE,), times=2.0),
                Bar(faster_than=(WHOLE,), times=1.5),
                Bar(faster_than=(CHUNKED,), times=1.5),
                Bar(floor=1.35),
            ),
        ),
        _case(
            rows,
            width,
            keys_learn=True,
            bars=(Bar(faster_than=(NAIVE,), times=1.4), Bar(faster_than=linear_cross_entropy, times=1.15)),
        ),
    ]
    for factor in (4, 16):
        for keys_learn in (False, True):
            made.append(_case(factor * rows, width, keys_learn=keys_learn, bars=(), memory_alone=True))
    return tuple(made)


CURVE = "queries and keys"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of queries and keys."""
    width, sizes = (16, (32, 64)) if quick else (256, (256, 1024, 4096))
    return {rows: _case(rows, width, keys_learn=False, bars=()) for rows in sizes}


def _case(rows: int, width: int, *, keys_learn: bool, bars: tuple[Bar, ...], memory_alone: bool = False) -> Case:
    gradients = "both gradients" if keys_learn else "keys without gradient"
    return Case(
        size=f"B = N = {rows}, d = {width}, {gradients}",
        inputs=partial(_inputs, rows, width, keys_learn),
        tiny=partial(_inputs, 64, 32, keys_learn),
        implementations=(
            Implementation(OURS, _ours),
            Implementation(NAIVE, _naive, note="F.cross_entropy(q @ k.T / t, arange)"),
            Implementation(
                CHUNKED, _chunked, NEEDED, note="options=LinearCrossEntropyOptions(): chunks of its own choice"
            ),
            Implementation(WHOLE, _whole, NEEDED, note="options=None"),
        ),
        truth=_truth,
        floor=Floor(f"{'three' if keys_learn else 'two'} torch.mm of B x N x d", _floor),
        bars=(*bars, Bar(extra_mib=MEMORY_BAR * rows)),
        timed=not memory_alone,
        large=memory_alone,
    )


# On a GPU


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    width, half = (16 if quick else 256), torch.bfloat16
    made = [
        _gpu_case(rows, width, half, keys_learn=keys_learn, quick=quick)
        for keys_learn in (False, True)
        for rows in ((96,) if quick else (4096, 16384, 65536))
    ]
    recomputed = _recomputed(64 if quick else 65536, 2 * width)
    whole = _gpu_case(64 if quick else 8192, width, torch.float32, keys_learn=True, quick=quick)
    return (*made, recomputed, whole, _in_tf32(whole))


def _gpu_case(rows: int, width: int, dtype: torch.dtype, *, keys_learn: bool, quick: bool) -> Case:
    peers = [Implementation(NAIVE, _naive, note="F.cross_entropy(q @ k.T / t, arange)")]
    bars: tuple[Bar, ...] = ()
    if dtype == torch.bfloat16:
        if not quick:
            compiled = torch.compile(_naive_loss, dynamic=False)
            peers.append(Implementation(COMPILED, partial(_naive, loss=compiled), note="of the same"))
        note = "cal_flash_loss; widens to float32, multiplies in tf32, always forms both gradients"
        peers.append(Implementation(INF_CL, _inf_cl, package="inf-cl", note=note))
        note = "options=LinearCrossEntropyOptions(): rounds to bfloat16"
        peers.append(Implementation(CHUNKED, _chunked, NEEDED, note=note))
        peers.append(Implementation(LIGER, _liger, package="liger-kernel", note="the keys are its weights"))
        bars = (Bar(faster_than=(NAIVE,), times=2.0 if keys_learn else 3.0), Bar(faster_than=(INF_CL,), times=1.2))
        if not keys_learn:
            bars += (Bar(share=0.5),) if quick else (Bar(faster_than=(COMPILED,), times=2.0), Bar(share=0.5))
            bars += (Bar(extra_mib=95.0),) if rows == 65536 else ()
    if not keys_learn:
        peers.append(Implementation(f"{OURS}, by tiles", _by_tiles, note="the products by torch, whatever the width"))
    products = 3 if keys_learn else 2
    return Case(
        size=f"{str(dtype)[6:]}, B = N = {rows}, d = {width}, "
        f"{'both gradients' if keys_learn else 'keys without gradient'}",
        inputs=partial(_inputs, rows, width, keys_learn, dtype=dtype),
        implementations=(Implementation(OURS, _ours), *peers),
        truth=_truth,
        work=Work(
            products * 2.0 * rows * rows * width,
            "bf16" if dtype == torch.bfloat16 else "fp32",
            f"{products} products of B x N x d",
        ),
        bars=bars,
    )


def _recomputed(rows: int, width: int) -> Case:
    """Our both gradients in the backward pass, beside those that are formed with the loss: a matter of memory."""
    return Case(
        size=f"bfloat16, B = N = {rows}, d = {width}, both gradients in the backward pass",
        inputs=partial(_inputs, rows, width, True, dtype=torch.bfloat16),
        implementations=(
            Implementation(f"{OURS}, recompute=True", partial(_ours, recompute=True)),
            Implementation(OURS, _ours, note="gradients formed with the loss"),
        ),
        truth=_truth,
        work=Work(3 * 2.0 * rows * rows * width, "bf16", "three products of B x N x d"),
        bars=(Bar(extra_mib=95.0),),
    )


def _in_tf32(case: Case) -> Case:
    """The case in float32, where torch allows all implementations to multiply in tf32."""

    def allowed(call: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
        settings.allow_tf32 = True
        try:
            return call(inputs)
        finally:
            settings.allow_tf32 = before

    implementations = tuple(replace(one, call=partial(allowed, one.call)) for one in case.implementations)
    work = replace(case.work, rate="tf32") if case.work else None
    return replace(case, size=f"{case.size}, tf32 allowed", implementations=implementations, work=work)


def _inf_cl(inputs: Inputs) -> Outputs:
    loss = importlib.import_module("inf_cl").cal_flash_loss(inputs["query"], inputs["key"], scale=1 / TEMPERATURE)
    return _gradients(loss.mean(), inputs)


def _liger(inputs: Inputs) -> Outputs:
    cross_entropy = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return _gradients(cross_entropy(inputs["query"] / TEMPERATURE, inputs["key"], inputs["target"]), inputs)


# The computations


def _inputs(
    rows: int, width: int, keys_learn: bool, device: torch.device, dtype: torch.dtype = torch.float32
) -> Inputs:
    draw = partial(torch.randn, rows, width, generator=torch.Generator(device).manual_seed(0), device=device)
    image = draw()  # what two views of it share
    query, key = (F.normalize(image + draw(), dim=1).to(dtype) for _ in range(2))
    target = torch.arange(rows, device=device)
    return {"query": query.requires_grad_(), "key": key.requires_grad_(keys_learn), "target": target}


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {"query": inputs["query"], "key": inputs["key"]})


def _ours(inputs: Inputs, *, recompute: bool = False) -> Outputs:
    return _gradients(info_nce(inputs["query"], inputs["key"], TEMPERATURE, recompute=recompute), inputs)


def _by_tiles(inputs: Inputs) -> Outputs:
    with mock.patch.object(contrastive_cuda, "_WIDEST_IN_ONE", 0):
        return _ours(inputs)


def _naive_loss(query: Tensor, key: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(query @ key.T / TEMPERATURE, target)


def _naive(inputs: Inputs, loss: Callable[..., Tensor] = _naive_loss) -> Outputs:
    return _gradients(loss(inputs["query"], inputs["key"], inputs["target"]), inputs)


def _chunked(inputs: Inputs) -> Outputs:
    # Fixed chunks of 64 to 2048 rows were no faster than its own choice.
    options = torch.nn.LinearCrossEntropyOptions()
    query = inputs["query"] / TEMPERATURE
    return _gradients(F.linear_cross_entropy(query, inputs["key"], inputs["target"], options=options), inputs)


def _whole(inputs: Inputs) -> Outputs:
    query = inputs["query"] / TEMPERATURE
    return _gradients(F.linear_cross_entropy(query, inputs["key"], inputs["target"]), inputs)


def _truth(inputs: Inputs) -> Outputs:
    """In float64, 1024 queries at a time: all logits of the largest case would not fit into a GPU's memory."""
    query, key = inputs["query"].detach().double(), inputs["key"].detach().double()
    of_query, of_key, total = torch.empty_like(query), torch.zeros_like(key), 0.0
    for start in range(0, len(query), 1024):
        rows = query[start : start + 1024]
        here = torch.arange(len(rows), device=rows.device)
        logits = rows @ key.T / TEMPERATURE
        normalizers = logits.logsumexp(dim=1)
        total += float((normalizers - logits[here, start + here]).sum())
        weights = (logits - normalizers[:, None]).exp_()
        weights[here, start + here] -= 1
        of_query[start : start + 1024] = weights @ key
        of_key += weights.T @ rows
    by = 1 / (TEMPERATURE * len(query))
    outputs = {"value": torch.tensor(total / len(query), dtype=torch.float64), "gradient in query": of_query * by}
    return outputs | ({"gradient in key": of_key * by} if inputs["key"].requires_grad else {})


def _floor(inputs: Inputs) -> Callable[[], None]:
    query, key = inputs["query"].detach(), inputs["key"].detach()
    logits, gradient = torch.empty(len(query), len(key)), torch.empty_like(query)

    def products() -> None:
        torch.mm(query, key.T, out=logits)
        torch.mm(logits, key, out=gradient)
        if inputs["key"].requires_grad:
            torch.mm(logits.T, query, out=gradient)

    return products
