"""Measures one case on a GPU: device time from a cold cache, memory, errors; and what the card itself can do.

Times are CUDA events around one call. Before each call a buffer larger than the second-level cache is written, so that
inputs come from memory, and the device sleeps, twice as long as the host takes to queue a call and at least 2 ms, so
that all is queued by the time it begins: the device's work is timed and not Python. "wall" is the time of calls one
after the other until the device is done, the host's included.

On the CPU (a rehearsal) the same code runs with the host's clock, to see that it runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.case import Errors, Implementation, Inputs, Outputs, largest_errors

LONGEST = 0.4  # seconds of repeats for each implementation
MOST, LEAST = 50, 5  # repeats
CLOCK = 2_000_000_000  # cycles a second, about; of the device's sleep
SHORTEST, LONGEST_SLEEP = 0.002, 0.2  # seconds

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What has to be reached. One of the limits is set."""

    faster_than: str = ""  # the name of a peer
    times: float = 0.0  # at least this many times as fast
    share: float = 0.0  # at least this part of the limit's rate
    extra_mb: float = 0.0  # at most, beyond the outputs
    milliseconds: float = 0.0  # at most


@dataclass(frozen=True)
class Case:
    """An operator at one size, on one device."""

    operator: str
    size: str
    inputs: Callable[[torch.device], Inputs]
    implementations: tuple[Implementation, ...]  # ours comes first
    truth: Callable[[Inputs], Outputs]  # in float64
    limit: str  # the rate that bounds it: "copy", "bf16", "tf32", "fp32", or "" for none
    work: float = 0.0  # bytes, or floating-point operations, that cannot be avoided
    of_work: str = ""  # what they are
    targets: tuple[Target, ...] = ()
    errors: Callable[[Outputs, Outputs, Inputs], Errors] = largest_errors
    reset: Callable[[Inputs], None] | None = None  # before each call, untimed: where a call changes its inputs


class _Calls(TorchDispatchMode):
    """Notes which compiled operators of fedkernels are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "fedkernels":
            self.names.add(str(function).removeprefix("fedkernels.").removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times single calls, each from a cold cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(max(2 * cache, 64 << 20), dtype=torch.uint8, device=device)

    def times(self, run: Callable[[], object], before: Callable[[], None] | None, repeats: int) -> list[float]:
        """Seconds of each of the repeats of run(); before() goes first and is not counted."""
        if self.device.type == "cpu":
            return [self._on_cpu(run, before) for _ in range(repeats)]
        cycles = round(CLOCK * min(max(2 * self._queueing(run, before), SHORTEST), LONGEST_SLEEP))
        marks = []
        for _ in range(repeats):
            if before is not None:
                before()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(cycles)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize(self.device)
            marks.append(start.elapsed_time(end) / 1e3)
        return marks

    def _queueing(self, run: Callable[[], object], before: Callable[[], None] | None) -> float:
        """Seconds until the host has queued a call: thousands of tensors take longer than their work on the device."""
        if before is not None:
            before()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return seconds

    def _on_cpu(self, run: Callable[[], object], before: Callable[[], None] | None) -> float:
        if before is not None:
            before()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


def card_limits(device: torch.device) -> dict[str, float]:
    """What this card does, measured: bytes per second of a copy, operations per second of a matrix product."""
    watch, large = Stopwatch(device), device.type == "cuda"
    size = 1 << 30 if large else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    copy = torch.empty_like(source)

    def median(run: Callable[[], object]) -> float:
        watch.times(run, None, 3)
        return statistics.median(watch.times(run, None, 10))

    limits = {"copy": 2 * size / median(partial(copy.copy_, source))}
    del source, copy
    side, before = 8192 if large else 128, torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32), ("fp32", torch.float32)):
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            product = torch.empty_like(a)
            limits[name] = 2 * side**3 / median(partial(torch.mm, a, b, out=product))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return limits


def measure_case(case: Case, device: torch.device, limits: dict[str, float]) -> dict[str, Any]:
    """-> {"operator", "size", "limit", "work", "rows", "targets"}: one row per implementation, ours first."""
    inputs = case.inputs(device)
    reset(case, inputs)
    truth = {name: tensor.cpu() for name, tensor in case.truth(inputs).items()}
    watch = Stopwatch(device)
    rows = [_row(case, one, inputs, truth, watch) for one in case.implementations]
    for row in rows:
        if case.limit and "median" in row:
            row["share"] = case.work / row["median"] / limits[case.limit]
        if "median" in row and "median" in rows[0]:
            row["ratio"] = row["median"] / rows[0]["median"]
    return {
        "operator": case.operator,
        "size": case.size,
        "limit": case.limit,
        "work": case.work,
        "of_work": case.of_work,
        "rows": rows,
        "targets": [judge(target, rows, case.limit) for target in case.targets],
    }


def reset(case: Case, inputs: Inputs) -> None:
    if case.reset is not None:
        case.reset(inputs)


def _row(case: Case, one: Implementation, inputs: Inputs, truth: Outputs, watch: Stopwatch) -> Row:
    row: Row = {"implementation": one.name, "note": one.note, "same_result": one.same_result, "status": "ok"}
    if one.package:
        try:
            row["version"] = f"{one.package} {version(one.package)}"
        except PackageNotFoundError:
            return row | {"status": "not installed"}
    try:
        row |= _measured(case, one, inputs, truth, watch)
    except Exception as error:  # a peer may fail in any way
        message = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        out = isinstance(error, torch.OutOfMemoryError)
        row["status"] = "out of memory" if out else f"failed: {message}"
    if watch.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _measured(case: Case, one: Implementation, inputs: Inputs, truth: Outputs, watch: Stopwatch) -> Row:
    row: Row = {}
    before = partial(case.reset, inputs) if case.reset is not None else None
    calls: _Calls | None = _Calls() if one is case.implementations[0] else None
    watched: AbstractContextManager[Any] = calls if calls is not None else torch.enable_grad()
    reset(case, inputs)
    with watched:  # also the warm-up
        outputs = one.call(inputs)
    if calls is not None:
        row["kernels"] = sorted(calls.names)
    row["errors"] = case.errors({name: tensor.cpu() for name, tensor in outputs.items()}, truth, _on_cpu(inputs))
    del outputs

    run = partial(one.call, inputs)
    scale = one.scale(inputs) if one.scale else 1.0
    once = watch.times(run, before, 2)[-1]
    repeats = max(LEAST, min(MOST, round(LONGEST / max(once, 1e-9))))
    times = sorted(scale * seconds for seconds in watch.times(run, before, repeats))
    quartiles = statistics.quantiles(times, n=4, method="inclusive")
    row |= {"median": statistics.median(times), "interquartile_range": quartiles[2] - quartiles[0]}
    row |= {"repeats": repeats, "times": times}
    if before is None:
        row["wall"] = scale * _wall(run, watch.device, repeats)
    if watch.device.type == "cuda":
        reset(case, inputs)
        row |= _memory(one, inputs, watch.device)
    return row


def _on_cpu(inputs: Inputs) -> Inputs:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _wall(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def _memory(one: Implementation, inputs: Inputs, device: torch.device) -> Row:
    """Bytes that the call took at its peak, those of its outputs, and the difference."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = one.call(inputs)
    growth = torch.cuda.max_memory_allocated(device) - before
    kept = torch.cuda.memory_allocated(device) - before
    del outputs
    return {"growth": growth, "outputs": kept, "extra": growth - kept}


def judge(target: Target, rows: list[Row], limit: str) -> dict[str, str]:
    """-> the target in words, what was measured, and "met", "missed" or "not measured"."""
    ours = rows[0]
    if target.faster_than:
        text, unit, most = f">= {target.times:g} x {target.faster_than}", " x", False
        peer = next(row for row in rows if row["implementation"] == target.faster_than)
        value, wanted = peer.get("ratio"), target.times
        if value is None:
            status = f"{target.faster_than}: {peer['status']}" if ours["status"] == "ok" else ours["status"]
            return {"target": text, "measured": status, "outcome": "not measured"}
    elif target.share:
        text, unit, most = f">= {target.share:.0%} of the {limit} rate", "", False
        value, wanted = ours.get("share"), target.share
    elif target.extra_mb:
        text, unit, most = f"< {target.extra_mb:g} MB beyond the outputs", " MB", True
        value, wanted = ours.get("extra"), target.extra_mb
        value = None if value is None else value / 1e6
    else:
        text, unit, most = f"< {target.milliseconds:g} ms", " ms", True
        value, wanted = ours.get("median"), target.milliseconds
        value = None if value is None else 1e3 * value
    if value is None:
        return {"target": text, "measured": ours["status"], "outcome": "not measured"}
    shown = f"{value:.0%}" if target.share else f"{value:.3g}{unit}"
    met = value < wanted if most else value >= wanted
    return {"target": text, "measured": shown, "outcome": "met" if met else "missed"}
