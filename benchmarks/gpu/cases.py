"""What is measured on a GPU, and the targets. `tiny` is the rehearsal: small sizes, nothing that is compiled first."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench_client_weights import _excess
from benchmarks.case import Implementation, Inputs, Outputs, in_float64, value_and_gradients
from benchmarks.gpu.measure import Case, Target
from benchmarks.parameters import model_shapes
from fedkernels import apply_deltas, client_weights, delta_gram, info_nce, linear_cka, nt_xent, unbalanced_ot

TEMPERATURE = 0.2
TAU = 0.8
EAGER, COMPILED, INF_CL = "eager cross entropy", "torch.compile", "Inf-CL, Triton"
BMM, MM, STACKED, EAGER_CKA = "eager bmm", "POT mm_unbalanced", "stacked mm", "eager CKA"


def cases(tiny: bool) -> list[Case]:
    rows = (96,) if tiny else (4096, 16384, 65536)
    return [
        *(_info_nce(size, 16 if tiny else 256, torch.bfloat16, False, tiny) for size in rows),
        *(_info_nce(size, 16 if tiny else 256, torch.bfloat16, True, tiny) for size in rows),
        _info_nce(64 if tiny else 8192, 16 if tiny else 256, torch.float32, True, tiny),
        _in_tf32(_info_nce(64 if tiny else 8192, 16 if tiny else 256, torch.float32, True, tiny)),
        _nt_xent(32 if tiny else 4096, 16 if tiny else 256),
        *(
            _linear_cka(pairs, samples, width)
            for pairs, samples, width in (((3, 20, 8),) if tiny else ((256, 256, 128), (256, 128, 64), (256, 64, 32)))
        ),
        _large_linear_cka(*((40, 8) if tiny else (5000, 512)), tiny),
        _unbalanced_ot(*((2, 12, 8) if tiny else (132, 128, 512))),
        *(_delta_gram(clients, tiny) for clients in ((3,) if tiny else (10, 100))),
        _apply_deltas(3 if tiny else 10, tiny),
        *(_client_weights(clients) for clients in ((5,) if tiny else (10, 100))),
    ]


# Contrastive losses


def _info_nce(rows: int, width: int, dtype: torch.dtype, keys_learn: bool, tiny: bool) -> Case:
    half = dtype != torch.float32
    peers = [Implementation(EAGER, _eager, note="F.cross_entropy(q @ k.T / t, arange)")]
    if not tiny and half:
        compiled = torch.compile(_eager_loss, dynamic=False)
        peers.append(Implementation(COMPILED, partial(_eager, loss=compiled), note="of the same"))
    if half:
        note = "cal_flash_loss; widens to float32, multiplies in tf32, always forms both gradients"
        peers.append(Implementation(INF_CL, _inf_cl, package="inf-cl", note=note))
    targets: list[Target] = []
    if half and not tiny and not keys_learn:
        targets = [Target(EAGER, 3.0), Target(COMPILED, 2.0), Target(INF_CL, 1.2), Target(share=0.5)]
        if rows == 65536:
            targets.append(Target(extra_mb=100.0))
    elif half and not tiny:
        targets = [Target(EAGER, 2.0), Target(INF_CL, 1.2)]
    products = 3 if keys_learn else 2
    return Case(
        operator="info_nce",
        size=f"{str(dtype)[6:]}, B = N = {rows}, d = {width}, {'both gradients' if keys_learn else 'no key gradient'}",
        inputs=partial(_views, rows, width, dtype, keys_learn),
        implementations=(Implementation("fedkernels.info_nce", _ours), *peers),
        truth=_exact_info_nce,
        limit="bf16" if half else "fp32",
        work=products * 2.0 * rows * rows * width,
        of_work=f"{products} products of B x N x d",
        targets=tuple(targets),
    )


def _in_tf32(case: Case) -> Case:
    """The case in float32, for all implementations with torch's leave to multiply in tf32."""

    def allowed(call: Callable[[Inputs], Outputs], inputs: Inputs) -> Outputs:
        settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
        settings.allow_tf32 = True
        try:
            return call(inputs)
        finally:
            settings.allow_tf32 = before

    implementations = tuple(replace(one, call=partial(allowed, one.call)) for one in case.implementations)
    return replace(case, size=f"{case.size}, tf32 allowed", implementations=implementations, limit="tf32")


def _views(rows: int, width: int, dtype: torch.dtype, keys_learn: bool, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    image = torch.randn(rows, width, generator=generator, device=device)  # what two views of it share
    query, key = (
        F.normalize(image + torch.randn(rows, width, generator=generator, device=device), dim=1).to(dtype)
        for _ in range(2)
    )
    target = torch.arange(rows, device=device)
    return {"query": query.requires_grad_(), "key": key.requires_grad_(keys_learn), "target": target}


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {"query": inputs["query"], "key": inputs["key"]})


def _ours(inputs: Inputs) -> Outputs:
    return _gradients(info_nce(inputs["query"], inputs["key"], TEMPERATURE), inputs)


def _eager_loss(query: Tensor, key: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(query @ key.T / TEMPERATURE, target)


def _eager(inputs: Inputs, loss: Callable[..., Tensor] = _eager_loss) -> Outputs:
    return _gradients(loss(inputs["query"], inputs["key"], inputs["target"]), inputs)


def _inf_cl(inputs: Inputs) -> Outputs:
    loss = importlib.import_module("inf_cl").cal_flash_loss(inputs["query"], inputs["key"], scale=1 / TEMPERATURE)
    return _gradients(loss.mean(), inputs)


def _exact_info_nce(inputs: Inputs) -> Outputs:
    """In float64, some rows at a time."""
    query, key = inputs["query"].detach().double(), inputs["key"].detach().double()
    of_query, of_key, total = torch.empty_like(query), torch.zeros_like(key), 0.0
    for start in range(0, len(query), 1024):
        rows = query[start : start + 1024]
        here = torch.arange(len(rows), device=rows.device)
        logits = rows @ key.T / TEMPERATURE
        shares = logits.logsumexp(dim=1)
        total += float((shares - logits[here, start + here]).sum())
        weights = (logits - shares[:, None]).exp_()
        weights[here, start + here] -= 1
        of_query[start : start + 1024] = weights @ key
        of_key += weights.T @ rows
    by = 1 / (TEMPERATURE * len(query))
    outputs = {"value": torch.tensor(total / len(query), dtype=torch.float64), "gradient in query": of_query * by}
    return outputs | ({"gradient in key": of_key * by} if inputs["key"].requires_grad else {})


def _nt_xent(rows: int, width: int) -> Case:
    return Case(
        operator="nt_xent",
        size=f"bfloat16, B = {rows}, d = {width}, both gradients",
        inputs=partial(_views, rows, width, torch.bfloat16, True),
        implementations=(
            Implementation("fedkernels.nt_xent", _ours_nt_xent),
            Implementation(EAGER, _eager_nt_xent, note="of z @ z.T / t with the diagonal at -inf"),
        ),
        truth=lambda inputs: _eager_nt_xent(in_float64(inputs)),
        limit="bf16",
        work=2 * 2.0 * (2 * rows) ** 2 * width,
        of_work="2 products of 2B x 2B x d",
    )


def _ours_nt_xent(inputs: Inputs) -> Outputs:
    return _gradients(nt_xent(inputs["query"], inputs["key"], TEMPERATURE), inputs)


def _eager_nt_xent(inputs: Inputs) -> Outputs:
    z = torch.cat([inputs["query"], inputs["key"]])
    logits = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return _gradients(F.cross_entropy(logits, inputs["target"].repeat(2).add_(_shifts(inputs["target"]))), inputs)


def _shifts(target: Tensor) -> Tensor:
    """Row i's positive is row i + B, and row i + B's is row i."""
    return torch.cat([torch.full_like(target, len(target)), torch.zeros_like(target)])


# CKA


def _linear_cka(pairs: int, samples: int, width: int) -> Case:
    return Case(
        operator="linear_cka",
        size=f"float32, {pairs} pairs, L = {samples}, d = {width}, both gradients",
        inputs=partial(_representations, pairs, samples, width),
        implementations=(
            Implementation("fedkernels.linear_cka", _ours_linear_cka),
            Implementation(BMM, _eager_linear_cka, note="|y'x|^2 / (|x'x| |y'y|) on the batch"),
        ),
        truth=lambda inputs: _eager_linear_cka(in_float64(inputs)),
        limit="fp32",
        work=pairs * 12.0 * samples * width * width,
        of_work="x'x and y'y at half, y'x, and four products of L x d x d",
        targets=(Target(BMM, 5.0),),
    )


def _large_linear_cka(samples: int, width: int, tiny: bool) -> Case:
    peers = [Implementation(EAGER_CKA, _eager_linear_cka, note="|y'x|^2 / (|x'x| |y'y|)")]
    if not tiny:
        compiled = torch.compile(_cka, dynamic=False)
        peers.append(Implementation(COMPILED, partial(_eager_linear_cka, cka=compiled), note="of the same"))
    return Case(
        operator="linear_cka",
        size=f"float32, one pair, L = {samples}, d = {width}, both gradients",
        inputs=lambda device: _one_pair(_representations(1, samples, width, device)),
        implementations=(Implementation("fedkernels.linear_cka", _ours_linear_cka), *peers),
        truth=lambda inputs: _eager_linear_cka(in_float64(inputs)),
        limit="fp32",
        work=14.0 * samples * width * width,
        of_work="x'x, y'y, y'x, and four products of L x d x d",
        targets=(Target(EAGER_CKA, 1.0),),
    )


def _one_pair(inputs: Inputs) -> Inputs:
    """Without the leading dimension: torch.mm's products are faster than torch.bmm's of one."""
    return {name: tensor.detach()[0].requires_grad_() for name, tensor in inputs.items()}


def _representations(pairs: int, samples: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    signal = torch.randn(pairs, samples, 32, generator=generator, device=device)
    mixing = [torch.randn(pairs, 32, width, generator=generator, device=device) / math.sqrt(32) for _ in range(2)]
    return {name: torch.relu(signal @ mix).requires_grad_() for name, mix in zip("xy", mixing, strict=True)}


def _of_both(value: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(value.sum(), inputs) | {"value": value.detach()}


def _ours_linear_cka(inputs: Inputs) -> Outputs:
    return _of_both(linear_cka(inputs["x"], inputs["y"]), inputs)


def _cka(x: Tensor, y: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm
    value: Tensor = norm(y.mT @ x).square() / (norm(x.mT @ x) * norm(y.mT @ y))
    return value


def _eager_linear_cka(inputs: Inputs, cka: Callable[..., Tensor] = _cka) -> Outputs:
    return _of_both(cka(inputs["x"], inputs["y"]), inputs)


# Transport


def _unbalanced_ot(problems: int, rows: int, width: int) -> Case:
    note = "one problem of the batch, times their number; float64, div='l2', 1000 iterations"
    return Case(
        operator="unbalanced_ot",
        size=f"float32, {problems} problems, B = {rows}, cost 1 - cos in d = {width}, to a gap of 1e-4, with gradient",
        inputs=partial(_costs, problems, rows, width),
        implementations=(
            Implementation("fedkernels.unbalanced_ot", _ours_unbalanced_ot),
            Implementation(MM, _pot, package="POT", note=note, scale=lambda inputs: len(inputs["cost"])),
        ),
        truth=_optimum,
        limit="",
        targets=(Target(milliseconds=2.0), Target(MM, 100.0)),
    )


def _costs(problems: int, rows: int, width: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    z, samples = (
        F.normalize(torch.randn(problems, rows, width, generator=generator, device=device), dim=-1) for _ in range(2)
    )
    return {"cost": (1 - z @ samples.mT).requires_grad_()}


def _ours_unbalanced_ot(inputs: Inputs) -> Outputs:
    value = unbalanced_ot(inputs["cost"], 1.0, 1.0, TAU, TAU)
    return value_and_gradients(value.sum(), inputs) | {"value": value.detach(), "first": value[0].detach()}


def _pot(inputs: Inputs) -> Outputs:
    cost = inputs["cost"][0].detach().double()
    ones = torch.ones(len(cost), dtype=torch.float64, device=cost.device)
    plan = importlib.import_module("ot").unbalanced.mm_unbalanced(ones, ones, cost, TAU, div="l2", numItermax=1000)
    penalties = (plan.sum(1) - 1).square().sum() + (plan.sum(0) - 1).square().sum()
    return {"first": (cost * plan).sum() + TAU / 2 * penalties}


def _optimum(inputs: Inputs) -> Outputs:
    cost = inputs["cost"].detach().cpu().double()
    value = unbalanced_ot(cost, 1.0, 1.0, TAU, TAU, tol=1e-9, max_iterations=10_000_000)
    return {"value": value, "first": value[0]}


# The server's step


def _models(shapes: list[torch.Size], clients: int, device: torch.device) -> Inputs:
    """As benchmarks.parameters, on the device: clients differ by 1 %, about half of that in common."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device)
    start = [draw(shape) for shape in shapes]
    common = [0.007 * draw(shape) for shape in shapes]
    others = [[p + c + 0.007 * draw(p.shape) for p, c in zip(start, common, strict=True)] for _ in range(clients)]
    return {"global": start, "clients": others, "first": [p.clone() for p in start]}


def _size_of(shapes: list[torch.Size], clients: int) -> str:
    return f"float32, K = {clients}, P = {_numbers(shapes) / 1e6:.3g} M in {len(shapes)} tensors"


def _numbers(shapes: list[torch.Size]) -> int:
    return sum(map(torch.Size.numel, shapes))


def _delta_gram(clients: int, tiny: bool) -> Case:
    shapes = model_shapes(tiny)
    return Case(
        operator="delta_gram",
        size=_size_of(shapes, clients),
        inputs=partial(_models, shapes, clients),
        implementations=(
            Implementation("fedkernels.delta_gram", _ours_delta_gram),
            Implementation(STACKED, _stacked, note="deltas flattened into K x P, then D @ D.T"),
        ),
        truth=_exact_delta_gram,
        limit="copy",
        work=4.0 * (clients + 1) * _numbers(shapes),
        of_work="one read of K + 1 models",
        targets=(Target(share=0.5 if clients > 10 else 0.8),),
    )


def _ours_delta_gram(inputs: Inputs) -> Outputs:
    return {"value": delta_gram(inputs["global"], inputs["clients"])}


def _stacked(inputs: Inputs) -> Outputs:
    flat = [
        torch.cat([(p - q).flatten() for p, q in zip(inputs["global"], client, strict=True)])
        for client in inputs["clients"]
    ]
    deltas = torch.stack(flat)
    return {"value": deltas @ deltas.T}


def _exact_delta_gram(inputs: Inputs) -> Outputs:
    clients = len(inputs["clients"])
    gram = torch.zeros(clients, clients, dtype=torch.float64, device=inputs["global"][0].device)
    for p, *versions in zip(inputs["global"], *inputs["clients"], strict=True):
        deltas = torch.stack([(p.double() - q.double()).flatten() for q in versions])
        gram += deltas @ deltas.T
    return {"value": gram}


def _apply_deltas(clients: int, tiny: bool) -> Case:
    shapes = model_shapes(tiny)
    return Case(
        operator="apply_deltas",
        size=_size_of(shapes, clients),
        inputs=partial(_models, shapes, clients),
        implementations=(
            Implementation("fedkernels.apply_deltas", _ours_apply_deltas),
            Implementation("torch._foreach_add_", _foreach, note="p *= 1 - sum w, then p += w client, over lists"),
        ),
        truth=_exact_apply_deltas,
        limit="copy",
        work=4.0 * (clients + 2) * _numbers(shapes),
        of_work="one read of K + 1 models and one write of one",
        reset=_reset,
    )


def _weights(inputs: Inputs) -> list[float]:
    clients = len(inputs["clients"])
    return [2 * (k + 1) / (clients * (clients + 1)) for k in range(clients)]  # sum 1


def _reset(inputs: Inputs) -> None:
    torch._foreach_copy_(inputs["global"], inputs["first"])


def _stepped(inputs: Inputs) -> Outputs:
    return {f"value {index}": p for index, p in enumerate(inputs["global"])}


def _ours_apply_deltas(inputs: Inputs) -> Outputs:
    apply_deltas(inputs["global"], inputs["clients"], _weights(inputs))
    return _stepped(inputs)


def _foreach(inputs: Inputs) -> Outputs:
    weights = _weights(inputs)
    torch._foreach_mul_(inputs["global"], 1 - sum(weights))
    for client, weight in zip(inputs["clients"], weights, strict=True):
        torch._foreach_add_(inputs["global"], client, alpha=weight)
    return _stepped(inputs)


def _exact_apply_deltas(inputs: Inputs) -> Outputs:
    weights = _weights(inputs)
    stepped = {}
    for index, (p, *versions) in enumerate(zip(inputs["first"], *inputs["clients"], strict=True)):
        wide = p.double()
        moved = [weight * (wide - q.double()) for weight, q in zip(weights, versions, strict=True)]
        stepped[f"value {index}"] = wide - torch.stack(moved).sum(0)
    return stepped


def _client_weights(clients: int) -> Case:
    return Case(
        operator="client_weights",
        size=f"float64, K = {clients}, to 1e-8",
        inputs=partial(_gram, clients),
        implementations=(
            Implementation("fedkernels.client_weights", _ours_client_weights),
            Implementation("the same on the CPU", _client_weights_on_cpu, note="with the copies to it and back"),
        ),
        truth=lambda inputs: {"value": client_weights(inputs["gram"].cpu(), tol=1e-13)},
        limit="",
        errors=_excess,
    )


def _gram(clients: int, device: torch.device) -> Inputs:
    """As in bench_client_weights.py: a common direction, eight that are shared, and a part of each client's own."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    deltas = 3 * draw(2048) + draw(clients, 8) @ draw(8, 2048) + draw(clients, 2048)
    return {"gram": (deltas @ deltas.T / 2048).to(device)}


def _ours_client_weights(inputs: Inputs) -> Outputs:
    return {"value": client_weights(inputs["gram"])}


def _client_weights_on_cpu(inputs: Inputs) -> Outputs:
    return {"value": client_weights(inputs["gram"].cpu()).to(inputs["gram"].device)}
