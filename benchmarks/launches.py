"""Launches and the host's time of the contrastive losses on CUDA, counted and measured without a GPU.

    python -m benchmarks.launches              # a table, in a minute

A loss is called with both gradients, and those in its scale and bias. Launches are counted on the meta device, in
bfloat16 with 512 columns: torch's operators by a dispatch mode, and ours by what their host functions launch. The
host's microseconds are the processor time of calls on the CPU with operators that launch nothing
(kernels_that_do_nothing.cpp), in float32, with rows and tiles so small that torch's own take no time: 1 / 64 of the
rows, in as many tiles. Beside them stand the losses as they are written in plain PyTorch, timed in turn.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import include_paths, library_paths

import fedkernels as fk
from benchmarks.measure import ROOT
from fedkernels.internal import contrastive_cuda, contrastive_one_tile, native

SIZES = 256, 4096, 16_384
_SHRINK = 64
_NO_LAUNCH: tuple[str, ...] = (
    "empty",
    "view",
    "detach",
    "alias",
    "expand",
    "unbind",
    "split",
    "narrow",
    "chunk",
    "slice",
    "select",
)
_NO_LAUNCH += ("t.", "transpose", "permute", "squeeze", "as_strided", "diagonal", "promote_types")


class Launches(TorchDispatchMode):
    """How many kernels would run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.removeprefix("_").removeprefix("unsafe_").removeprefix("new_")
        self.count += func.namespace == "aten" and not name.startswith(_NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def kernels_that_count(launches: Launches) -> SimpleNamespace:
    """In place of the operators between torch's products, on the meta device."""

    def sums(products: Tensor, *arguments: Any) -> None:
        launches.count += 1 + (arguments[4].numel() > 0)  # of columns

    def one_tile(query: Tensor, key: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        of_columns, *_, bias, _, wanted, _ = arguments[4:]
        # The product, the sums by row and column, the weights, and the reduction; a sigmoid loss has its weights with
        # its sums.
        launches.count += 3 + (0 if bias is not None else (of_columns > 0) + wanted)
        weights = query.new_empty(len(query), len(key))
        return query.new_empty(()), query.new_empty(3, dtype=torch.float64), weights

    def in_one(query: Tensor, key: Tensor, temperature: float, gradient: bool) -> tuple[Tensor, Tensor]:
        launches.count += 2
        return query.new_empty(len(query), dtype=torch.float32), query.new_empty(query.shape, dtype=torch.float32)

    def finish(*arguments: Any) -> tuple[Tensor, Tensor]:
        query, key, _, of_query, of_key = arguments[8:13]
        launches.count += 1 + of_query + of_key  # a product for each gradient
        return torch.empty_like(query), torch.empty_like(key)

    def other(*_: Any) -> None:
        launches.count += 1

    return SimpleNamespace(
        **{f"contrastive_{one.__name__}": one for one in (sums, one_tile, in_one, finish)},
        **{f"contrastive_{name}": other for name in ("weights", "sigmoid")},
    )


@contextmanager
def as_on_cuda(kernels: Any, shrink: int) -> Iterator[None]:
    """Tensors on the CPU and the meta device count as CUDA's, and tiles are so much smaller along both sides.

    `kernels` holds the operators between torch's products.
    """
    tiles = contrastive_cuda
    sizes: dict[str, Any] = {"TILE_BYTES": tiles.TILE_BYTES // shrink**2, "_TILE_ROWS": tiles._TILE_ROWS // shrink}
    sizes |= {name: getattr(tiles, name) // shrink for name in ("_FEWEST_ROWS", "_FEWEST_ROWS_OF_KEY_GRADIENT")}
    with (
        torch.library._scoped_library("fedkernels", "IMPL") as library,
        patch.multiple(tiles, _ops=kernels, **sizes),
        patch.multiple(contrastive_one_tile, _ops=kernels, is_without_data=lambda _: False),
        patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)),
        patch.object(native, "operator", lambda name, *_: getattr(torch.ops.fedkernels, name).default),
    ):
        for name, operator in tiles.OPERATORS.items():
            library.impl(name, operator, "CPU", allow_override=True)
            library.impl(name, operator, "Meta", allow_override=True)
        yield


def _numbers(rows: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=rows.device)


def _info_nce(query: Tensor, key: Tensor) -> Tensor:
    return F.cross_entropy(query @ key.T / 0.2, _numbers(query, len(query)))


def _nt_xent(view1: Tensor, view2: Tensor) -> Tensor:
    z = torch.cat([view1, view2])
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return F.cross_entropy((z @ z.T / 0.2).masked_fill(itself, -torch.inf), _numbers(z, len(z)).roll(len(view1)))


def _clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, pairs = scale * image @ text.T, _numbers(image, len(image))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def _sigmoid_loss(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * image @ text.T + bias
    signs = 2 * torch.eye(len(image), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


def _supervised(features: Tensor, labels: Tensor) -> Tensor:
    positive = (labels[:, None] == labels).to(features.dtype)
    itself = 1 - torch.eye(len(features), dtype=features.dtype, device=features.device)
    positive, logits = positive * itself, features @ features.T / 0.2
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    log_p = logits - (logits.exp() * itself).sum(1, keepdim=True).log()
    return -((positive * log_p).sum(1) / positive.sum(1)).mean()


Loss = Callable[..., Tensor]
# By name our loss, the plain one, and how many matrices and numbers they take.
LOSSES: dict[str, tuple[Loss, Loss, int, int]] = {
    "info_nce": (lambda query, key: fk.info_nce(query, key, 0.2), _info_nce, 2, 0),
    "nt_xent": (lambda view1, view2: fk.nt_xent(view1, view2, 0.2), _nt_xent, 2, 0),
    "clip_loss": (fk.clip_loss, _clip_loss, 2, 1),
    "sigmoid_loss": (fk.sigmoid_loss, _sigmoid_loss, 2, 2),
    "supervised_contrastive_loss": (
        *(lambda features, labels: fk.supervised_contrastive_loss(features, labels, 0.2), _supervised),
        *(1, 0),
    ),
}


def call_of(loss: Loss, rows: int, width: int, counts: tuple[int, int], like: Tensor) -> Callable[[], object]:
    inputs = [torch.randn(rows, width).to(like).requires_grad_() for _ in range(counts[0])]
    inputs += [torch.ones((), dtype=torch.float32).to(like.device).requires_grad_() for _ in range(counts[1])]
    labels = [torch.arange(rows).to(like.device) // 2] if counts[0] == 1 else []  # of SupCon, which takes one matrix
    one = torch.ones_like(loss(*inputs, *labels))
    return lambda: torch.autograd.grad(loss(*inputs, *labels), inputs, one)


def launches_of(name: str, rows: int, plain: bool = False) -> int:
    """Of the loss and all its gradients."""
    ours, eager, *counts = LOSSES[name]
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    launches = Launches()
    with as_on_cuda(kernels_that_count(launches), 1):
        call = call_of(eager if plain else ours, rows, 512, (counts[0], counts[1]), like)
        launches.count = 0
        with launches:
            call()
    return launches.count


@cache
def without_kernels() -> Any:
    """The operators between torch's products, whose host functions run on the CPU and launch nothing."""
    folder = tempfile.mkdtemp()
    library, source = f"{folder}/kernels_that_do_nothing.so", Path(__file__).with_name("kernels_that_do_nothing.cpp")
    where = [f"-I{path}" for path in (ROOT / "csrc", *include_paths())] + [f"-L{path}" for path in library_paths()]
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    subprocess.run(["c++", *flags, *where, str(source), "-ltorch_cpu", "-lc10", "-o", library], check=True)
    torch.ops.load_library(library)
    shutil.rmtree(folder)
    return torch.ops.fedkernels


def host_seconds(name: str, rows: int, repeats: int = 20) -> tuple[float, float]:
    """Processor time of a call with all gradients, of ours and of the plain loss: the least of these repeats."""
    ours, eager, *counts = LOSSES[name]
    found: tuple[list[float], list[float]] = [], []
    with as_on_cuda(without_kernels(), _SHRINK):
        calls = [
            call_of(loss, size, 8, (counts[0], counts[1]), torch.empty(0))
            for loss, size in ((ours, max(rows // _SHRINK, 2)), (eager, 8))
        ]
        for _ in range(repeats + 1):  # the first warms up
            for call, seconds in zip(calls, found, strict=True):
                start, count = time.process_time(), 0
                while count < 3 or time.process_time() - start < 0.02:
                    call()
                    count += 1
                seconds.append((time.process_time() - start) / count)
    return min(found[0][1:]), min(found[1][1:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':28} {'rows':>6}  {'launches':>8} {'plain':>6}  {'host, us':>8} {'plain':>6}")
    for name in LOSSES:
        for rows in SIZES:
            ours, plain = host_seconds(name, rows)
            counts = f"{launches_of(name, rows):8} {launches_of(name, rows, plain=True):6}"
            print(f"{name:28} {rows:6}  {counts}  {ours * 1e6:8.0f} {plain * 1e6:6.0f}", flush=True)


if __name__ == "__main__":
    main()
