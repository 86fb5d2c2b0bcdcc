"""``python -m benchmarks.tiles``: the contrastive losses on a GPU by the size of a tile, and the kernels of a call.

It prints milliseconds of the loss with all its gradients in bfloat16, the median of five calls by CUDA events, and
which kernels a call consists of, by torch's profiler. Without a GPU it runs tiny sizes on the CPU, to see that it runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fedkernels import clip_loss, info_nce, nt_xent, sigmoid_loss, supervised_contrastive_loss
from fedkernels.internal import contrastive_cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = ((4096, 128), (8192, 512), (16_384, 512), (65_536, 256)) if DEVICE.type == "cuda" else ((64, 16),)
MEBIBYTES = 24, 64, 128, 256, 512, 1024
MOST_ROWS_OF_ALL = 20_000  # beyond, the losses with more launches take seconds by small tiles


def calls(rows: int, width: int) -> dict[str, Callable[[], object]]:
    """By name the loss of so many rows, with the gradients in all that it learns from."""
    query, key = (F.normalize(torch.randn(rows, width, device=DEVICE), dim=1).bfloat16() for _ in range(2))
    scale, labels = torch.tensor(5.0, device=DEVICE), torch.randint(0, 100, (rows,), device=DEVICE)
    learned = [one.requires_grad_() for one in (query, key, scale)]

    def both(loss: Callable[[], Tensor], count: int) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), learned[:count])

    found = {
        "info_nce": both(lambda: info_nce(query, key, 0.2), 2),
        "clip_loss": both(lambda: clip_loss(query, key, scale), 3),
        "nt_xent": both(lambda: nt_xent(query, key, 0.2), 2),
        "sigmoid_loss": both(lambda: sigmoid_loss(query, key, scale, -10.0), 3),
        "supervised_contrastive_loss": both(lambda: supervised_contrastive_loss(query, labels, 0.2), 1),
    }
    return found if rows <= MOST_ROWS_OF_ALL else {"info_nce": found["info_nce"]}


def milliseconds(call: Callable[[], object]) -> float:
    call()
    if DEVICE.type == "cpu":
        return 0.0
    found = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)  # until the host has queued the call
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    for rows, width in SIZES:
        made = calls(rows, width)
        print(f"{rows} rows of {width}", *made, sep=", ", flush=True)
        for mebibytes in MEBIBYTES:
            with patch.object(contrastive_cuda, "TILE_BYTES", mebibytes << 20):
                print(f"{mebibytes:5} MiB", *(f"{milliseconds(call):8.3f}" for call in made.values()), flush=True)
        for name, call in made.items():
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                call()
            kernels = [one for one in profiled.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
            for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:8]:
                print(f"  {name}: {one.self_device_time_total:9.0f} us, {one.count} x {one.key[:100]}", flush=True)


if __name__ == "__main__":
    main()
