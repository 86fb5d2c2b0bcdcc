"""What measuring on a GPU takes: a clock of CUDA events, the allocator's peak, and the rates of the card itself.

Before each timed call a buffer larger than the second-level cache is written, so that inputs come from memory, and the
device sleeps, twice as long as the host takes to queue a call and at least 2 ms. Everything is queued by the time it
wakes up, so the device's work is timed and Python's is not.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.case import Case, Clock, Implementation, Inputs

WALL_CALLS = 5
SLEEP_CLOCK = 2_000_000_000  # cycles a second of the device's sleep, approximately
SHORTEST_SLEEP, LONGEST_SLEEP = 0.002, 0.2  # seconds


class EventClock:
    """CUDA events around single calls, each from a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush = torch.empty(max(2 * cache, 64 << 20), dtype=torch.uint8, device=device)

    def timer(self, run: Callable[[], object], before: Callable[[], None] | None) -> Callable[[], float]:
        queueing = host_seconds(run, before, self.device, until_done=False)
        cycles = round(SLEEP_CLOCK * min(max(2 * queueing, SHORTEST_SLEEP), LONGEST_SLEEP))
        return partial(self._seconds, run, before, cycles)

    def _seconds(self, run: Callable[[], object], before: Callable[[], None] | None, cycles: int) -> float:
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3


def host_seconds(
    run: Callable[[], object],
    before: Callable[[], None] | None,
    device: torch.device,
    *,
    until_done: bool,
    calls: int = 1,
) -> float:
    """Seconds of a call by the host's clock, until the host has queued it or until the device is done."""
    if before is not None:
        before()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if until_done:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return seconds / calls


def wall_and_memory(case: Case, implementation: Implementation, inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """-> "wall", seconds, and "growth", "outputs" and "extra", bytes.

    The wall time is that of calls one after the other with the host's part. Calls that need a reset have none.
    """
    measured: dict[str, Any] = {}
    if case.reset is None:
        scale = implementation.scale(inputs) if implementation.scale else 1.0
        run = partial(implementation.call, inputs)
        measured["wall"] = scale * host_seconds(run, None, device, until_done=True, calls=WALL_CALLS)
    return measured | _peak_memory(case, implementation, inputs, device)


def _peak_memory(case: Case, implementation: Implementation, inputs: Inputs, device: torch.device) -> dict[str, int]:
    if case.reset is not None:
        case.reset(inputs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = implementation.call(inputs)
    growth = torch.cuda.max_memory_allocated(device) - before
    kept = torch.cuda.memory_allocated(device) - before
    del outputs
    return {"growth": growth, "outputs": kept, "extra": growth - kept}


def measured_rates(device: torch.device, clock: Clock) -> dict[str, float]:
    """What the device does: "copy", bytes a second read and written; "bf16", "tf32", "fp32", operations a second.

    On a GPU of a copy of 1 GiB and of products of 8192^3; on the CPU, in a rehearsal, of small ones.
    """
    large = device.type == "cuda"
    size = 1 << 30 if large else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    copy = torch.empty_like(source)

    def median(run: Callable[[], object]) -> float:
        timer = clock.timer(run, None)
        timer()
        return statistics.median(timer() for _ in range(10))

    rates = {"copy": 2 * size / median(partial(copy.copy_, source))}
    del source, copy
    side, before = 8192 if large else 128, torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32), ("fp32", torch.float32)):
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            product = torch.empty_like(a)
            rates[name] = 2 * side**3 / median(partial(torch.mm, a, b, out=product))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return rates
