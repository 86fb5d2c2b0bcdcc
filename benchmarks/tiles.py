"""``python -m benchmarks.tiles``: the contrastive losses on a GPU by the size of a tile, beside plain PyTorch.

It prints milliseconds of a loss with all its gradients in bfloat16, the median of five calls by CUDA events, and which
kernels a call of ours consists of, by torch's profiler. Without a GPU it runs tiny sizes on the CPU, as a rehearsal.
"""

import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.launches import LOSSES, call_of
from benchmarks.measure import Settings
from fedkernels.internal import contrastive_cuda

MEBIBYTES = 24, 64, 128, 256, 512, 1024


def main() -> None:
    on_gpu = torch.cuda.is_available()
    settings = Settings("cuda", rehearse=not on_gpu, quick=False, threads=2, repeats=None)
    like, clock = torch.empty(0, dtype=torch.bfloat16, device=settings.torch_device()), settings.clock()

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        timer = clock.timer(call, None)
        return 1e3 * statistics.median(timer() for _ in range(5))

    for rows, width in ((4096, 128), (8192, 512), (16_384, 512), (65_536, 256)) if on_gpu else ((64, 16),):
        for name, (ours, plain, *counts) in LOSSES.items():
            if rows > 20_000 and name != "info_nce":  # the others take seconds by small tiles
                continue
            call, peer = (call_of(loss, rows, width, (counts[0], counts[1]), like) for loss in (ours, plain))
            found = []
            for mebibytes in MEBIBYTES:
                with patch.object(contrastive_cuda, "TILE_BYTES", mebibytes << 20):
                    found.append(f"{mebibytes} MiB {milliseconds(call):.3f}")
            print(f"{name}, {rows} rows of {width}:", ", ".join(found), f"plain {milliseconds(peer):.3f}", flush=True)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                call()
            kernels = [one for one in profiled.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA]
            for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:8]:
                print(f"  {one.self_device_time_total:9.0f} us, {one.count} x {one.key[:100]}", flush=True)


if __name__ == "__main__":
    main()
