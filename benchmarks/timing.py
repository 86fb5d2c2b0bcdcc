"""Times the implementations of a case in one process, in turn, and compares their outputs with the truth.

After a warm-up call each, every repeat calls all implementations and the floor one after the other.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.case import Case, Clock, Implementation, Inputs, Outputs, Timer, largest_errors
from benchmarks.gpu import wall_and_memory

SHORTEST = 0.02  # seconds: the host's clock repeats a shorter call
LONGEST = 0.4  # seconds of an implementation's repeats, where their number is not given
LEAST, MOST = 5, 50  # repeats, where their number is not given

Row = dict[str, Any]


class HostClock:
    """The host's clock. Calls shorter than 20 ms are repeated and averaged, unless each needs a reset before it."""

    def timer(self, run: Callable[[], object], before: Callable[[], None] | None) -> Timer:
        once = self._seconds(run, before, 1)
        count = 1 if before is not None else min(1000, max(1, round(SHORTEST / once)))
        return partial(self._seconds, run, before, count)

    def _seconds(self, run: Callable[[], object], before: Callable[[], None] | None, count: int) -> float:
        if before is not None:
            before()
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        for _ in range(count):
            run()
        seconds = time.perf_counter() - start
        gc.enable()
        return seconds / count


class _CompiledCalls(TorchDispatchMode):
    """Records which compiled operators of fedkernels are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "fedkernels":
            self.names.add(str(function).removeprefix("fedkernels.").removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def time_case(
    case: Case, implementations: list[Implementation], device: torch.device, clock: Clock, repeats: int | None
) -> dict[str, Any]:
    """Times, errors, and the compiled operators that ours called.

    Args:
        repeats: of each call; None: 5 to 50, as many as fit into 0.4 s.

    Returns:
        {"rows": {name: row}, "floor": times}, with "floor" where the case has one. A row holds "times", seconds, and
        "errors" where the case has a truth, or "status", what went wrong.
    """
    inputs = case.inputs(device)
    before = partial(case.reset, inputs) if case.reset is not None else None
    rows: dict[str, Row] = {one.name: {} for one in implementations}
    outputs: dict[str, Outputs] = {}
    timers: dict[str, tuple[Timer, int]] = {}
    for one in implementations:
        try:
            if one is case.implementations[0]:
                with _CompiledCalls() as calls:  # also the warm-up
                    outputs[one.name] = _copies(call(case, one, inputs))
                rows[one.name]["kernels"] = sorted(calls.names)
            else:
                outputs[one.name] = _copies(call(case, one, inputs))
            timers[one.name] = _timer(clock, partial(one.call, inputs), before, repeats)
        except Exception as error:  # a peer may fail in any way
            outputs.pop(one.name, None)
            rows[one.name]["status"] = problem(error)
    if case.floor is not None:
        work = case.floor.prepare(inputs)
        work()
        timers["floor"] = _timer(clock, work, before, repeats)

    times = _in_turn(timers)
    for one in implementations:
        if one.name in times:
            scale = one.scale(inputs) if one.scale else 1.0
            rows[one.name]["times"] = [scale * seconds for seconds in times[one.name]]
            if device.type == "cuda":
                rows[one.name] |= wall_and_memory(case, one, inputs, device)
    if case.truth is not None:
        if case.reset is not None:
            case.reset(inputs)
        truth, inputs_on_cpu = _on_cpu(case.truth(inputs)), _on_cpu(inputs)
        for name, kept in outputs.items():
            rows[name]["errors"] = (case.errors or largest_errors)(kept, truth, inputs_on_cpu)
    return {"rows": rows, **({"floor": times["floor"]} if case.floor is not None else {})}


def call(case: Case, implementation: Implementation, inputs: Inputs) -> Outputs:
    if case.reset is not None:
        case.reset(inputs)
    return implementation.call(inputs)


def problem(error: Exception) -> str:
    """An exception as the status of a row."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "alloc" in text or "not enough memory" in text:
        return "out of memory"
    return f"failed: {text.splitlines()[0][:200]}"


def _timer(
    clock: Clock, run: Callable[[], object], before: Callable[[], None] | None, repeats: int | None
) -> tuple[Timer, int]:
    timer = clock.timer(run, before)
    return timer, repeats or max(LEAST, min(MOST, round(LONGEST / max(timer(), 1e-9))))


def _in_turn(timers: dict[str, tuple[Timer, int]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in timers}
    for repeat in range(max((repeats for _, repeats in timers.values()), default=0)):
        for name, (timer, repeats) in timers.items():
            if repeat < repeats:
                times[name].append(timer())
    return times


def _copies(outputs: Outputs) -> Outputs:
    """On the CPU; the next call may write into the same tensors."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in outputs.items()}


def _on_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in tensors.items()}
