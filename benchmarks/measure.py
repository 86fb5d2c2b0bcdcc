"""Measures one case: memory in a process of its own per implementation, times in one process for all, in turn.

The processes are this module run with a request (JSON) as its argument; each writes its answer to the file that the
request names.

Memory: inputs are made and the library is warmed up on a tiny size. Then the peak of the resident set is reset
(/proc/self/clear_refs), the implementation called once, and the peak (VmHWM) compared with what stood before the
call. The outputs' own bytes are told apart. The address space is limited, so that a peer that needs more than the
machine has ends with an error and not with the machine.

Times: after a warm-up call each, every repeat calls all implementations and the floor one after the other. Calls
shorter than 20 ms are repeated within a repeat and averaged. The process keeps what is freed: otherwise the next call
would pay for handing back what the one before it held (0.1 s in place of 4 ms after one that held 6 GB).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Bar, Case, Implementation, Inputs, Outputs, largest_errors

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0  # seconds, for one call of one implementation with all that surrounds it, and for one's repeats
MOST_MEMORY = 12 * 2**30  # bytes that an implementation may ask for, and not more than 3/4 of what is free
SHORTEST = 0.02  # seconds: a shorter call is repeated

Row = dict[str, Any]


def load_cases(operator: str, quick: bool) -> tuple[Case, ...]:
    """The cases of ``bench_OPERATOR.py``."""
    return importlib.import_module(f"benchmarks.bench_{operator}").cases(quick)


def measure_case(operator: str, index: int, *, threads: int, repeats: int, quick: bool) -> dict[str, Any]:
    """-> {"size", "floor", "rows", "bars"}: one row per implementation, ours first; see benchmarks/README.md."""
    case = load_cases(operator, quick)[index]
    request = {"operator": operator, "index": index, "threads": threads, "repeats": repeats, "quick": quick}
    rows = [_memory_row(case, implementation, request) for implementation in case.implementations]
    floor: Row | None = None
    if case.timed:
        names = [row["implementation"] for row in rows if row["status"] == "ok" and _fits(row, repeats)]
        answer = _child({**request, "task": "time", "names": names}, TIMEOUT * (len(names) + 1))
        for row in rows:
            row.update(answer.get("rows", {}).get(row["implementation"], {}))
            if "status" in answer and row["status"] == "ok":
                row["status"] = answer["status"]
            elif row["status"] == "ok" and "times" not in row:
                row["status"] = f"one call took {row['one_call']:.0f} s: not repeated"
        if case.floor is not None and "floor" in answer:
            floor = {"definition": case.floor.definition, "times": answer["floor"]}
    return finish(case.size, rows, floor, case.bars)


def finish(size: str, rows: list[Row], floor: Row | None, bars: tuple[Bar, ...]) -> dict[str, Any]:
    """Medians, spreads and ratios from the times, and what became of the bars."""
    for row in [*rows, *([floor] if floor else [])]:
        if "times" in row:
            row["median"] = statistics.median(row["times"])
            quartiles = (
                statistics.quantiles(row["times"], n=4, method="inclusive") if len(row["times"]) > 1 else [0] * 3
            )
            row["interquartile_range"] = quartiles[2] - quartiles[0]
    ours = rows[0].get("median")
    if ours:
        for row in rows[1:]:
            if "median" in row:
                row["ratio"] = row["median"] / ours
        if floor:
            floor["ratio"] = ours / floor["median"]
    return {"size": size, "floor": floor, "rows": rows, "bars": [_judge(bar, rows, floor) for bar in bars]}


def _judge(bar: Bar, rows: list[Row], floor: Row | None) -> dict[str, str]:
    ours = rows[0]
    if bar.faster_than:
        peers = [row for row in rows if row["implementation"] in bar.faster_than]
        ratios = {row["implementation"]: row["ratio"] for row in peers if "ratio" in row}
        best = min(ratios, key=lambda name: ratios[name], default="")
        text = f">= {bar.times:g} x {best or ' or '.join(bar.faster_than)}"
        if best:
            return _outcome(text, f"{ratios[best]:.2f} x", ratios[best] >= bar.times)
        return {"bar": text, "measured": "; ".join(row["status"] for row in peers), "outcome": "not measured"}
    if bar.floor:
        text, value, limit, unit = f"<= {bar.floor:g} x floor", (floor or {}).get("ratio"), bar.floor, " x"
    elif bar.extra_mib:
        extra = ours.get("extra")
        value = None if extra is None else extra / 2**20
        text, limit, unit = f"<= {bar.extra_mib:g} MiB beyond outputs", bar.extra_mib, " MiB"
    else:
        text, value, limit, unit = f"error <= {bar.error:g}", ours.get("errors", {}).get("value"), bar.error, ""
    if value is None:
        return {"bar": text, "measured": "-", "outcome": "not measured"}
    return _outcome(text, f"{value:.3g}{unit}", value <= limit)


def _outcome(text: str, measured: str, met: bool) -> dict[str, str]:
    return {"bar": text, "measured": measured, "outcome": "met" if met else "missed"}


def _memory_row(case: Case, implementation: Implementation, request: dict[str, Any]) -> Row:
    row: Row = {"implementation": implementation.name, "note": implementation.note}
    row["same_result"] = implementation.same_result
    if implementation.package:
        try:
            row["version"] = f"{implementation.package} {version(implementation.package)}"
        except PackageNotFoundError:
            row["status"] = "not installed"
            return row
    answer = _child({**request, "task": "memory", "names": [implementation.name]}, TIMEOUT)
    row.update({"status": "ok", **answer})
    return row


def _fits(row: Row, repeats: int) -> bool:
    return bool(row["one_call"] * (repeats + 1) <= TIMEOUT)


# The parent's side of a process


def _child(request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The answer of a process, or {"status": what went wrong}."""
    threads = str(request["threads"])
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    if request["task"] == "memory":
        limits["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory leaves the process, else glibc's heuristics count
    else:
        # What glibc comes to by itself, but for giving back gigabytes that a peer freed during another's call.
        limits |= {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.measure", json.dumps({**request, "answer": str(answer)})]
        try:  # on any exception, Ctrl-C included, run() kills the process and waits for it
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **limits}, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return {"status": f"not ready after {timeout:.0f} s"}
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
    if done.returncode < 0:
        return {"status": f"killed by signal {-done.returncode} (memory, most likely)"}
    return {"status": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}"}


# The process's side


def _main(request: dict[str, Any]) -> None:
    torch.set_num_threads(request["threads"])
    case = load_cases(request["operator"], request["quick"])[request["index"]]
    chosen = [one for one in case.implementations if one.name in request["names"]]
    answer = _memory(case, chosen[0]) if request["task"] == "memory" else _times(case, chosen, request["repeats"])
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _memory(case: Case, implementation: Implementation) -> dict[str, Any]:
    _call(case, implementation, case.tiny())
    torch.mm(torch.ones(512, 512), torch.ones(512, 512)).sum()  # starts the threads, whose stacks count too
    inputs = case.inputs()
    _limit_memory()
    start = time.perf_counter()
    try:
        outputs, growth = _peak_growth(lambda: _call(case, implementation, inputs))
    except (MemoryError, RuntimeError) as error:
        return {"status": _problem(error)}
    answer: dict[str, Any] = {"one_call": time.perf_counter() - start}
    if growth is not None:
        own = _storages(inputs)
        fresh = {address: size for address, size in _storages(outputs).items() if address not in own}
        answer |= {"growth": growth, "outputs": sum(fresh.values()), "extra": max(0, growth - sum(fresh.values()))}
    return answer


def _times(case: Case, implementations: list[Implementation], repeats: int) -> dict[str, Any]:
    inputs = case.inputs()
    rows: dict[str, Row] = {one.name: {} for one in implementations}
    kept: dict[str, Outputs] = {}
    runs: dict[str, tuple[Callable[[], object], int]] = {}  # name -> what is timed, how often per repeat
    for one in implementations:
        kept[one.name] = {name: tensor.clone() for name, tensor in _call(case, one, inputs).items()}
        runs[one.name] = _repeated(case, partial(one.call, inputs), inputs)
    if case.floor is not None:
        call = case.floor.prepare(inputs)
        call()
        runs["floor"] = _repeated(case, call, inputs)

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, (run, count) in runs.items():
            times[name].append(_time(case, run, inputs, count))
    for one in implementations:
        scale = one.scale(inputs) if one.scale else 1.0
        rows[one.name]["times"] = [scale * seconds for seconds in times[one.name]]
    if case.truth is not None:
        if case.reset is not None:
            case.reset(inputs)
        truth = case.truth(inputs)
        for one in implementations:
            rows[one.name]["errors"] = (case.errors or largest_errors)(kept[one.name], truth, inputs)
    return {"rows": rows, **({"floor": times["floor"]} if case.floor is not None else {})}


def _call(case: Case, implementation: Implementation, inputs: Inputs) -> Outputs:
    if case.reset is not None:
        case.reset(inputs)
    return implementation.call(inputs)


def _repeated(case: Case, run: Callable[[], object], inputs: Inputs) -> tuple[Callable[[], object], int]:
    """How often to call in one repeat; a call that changes its inputs is timed alone."""
    once = _time(case, run, inputs, 1)
    return run, 1 if case.reset is not None else min(1000, max(1, round(SHORTEST / once)))


def _time(case: Case, run: Callable[[], object], inputs: Inputs, count: int) -> float:
    if case.reset is not None:
        case.reset(inputs)
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    for _ in range(count):
        run()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds / count


def _peak_growth(run: Callable[[], Outputs]) -> tuple[Outputs, int | None]:
    """-> what `run` returns, and by how many bytes the resident set grew at most; None where Linux does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed pages that are still resident would hide growth
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    except (OSError, AttributeError):
        return run(), None
    outputs = run()
    return outputs, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """Bytes of one line of /proc/self/status, which counts in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _limit_memory() -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        limit = _status("VmSize") + min(MOST_MEMORY, 3 * free // 4)
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _problem(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if isinstance(error, MemoryError) or "alloc" in text or "not enough memory" in text:
        return "out of memory"
    return f"failed: {text.splitlines()[0][:200]}"


def _storages(value: object) -> dict[int, int]:
    """Address and bytes of every storage that the tensors in (nested) dicts, lists and tuples use."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return {address: size for item in value for address, size in _storages(item).items()}
    return {}


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
