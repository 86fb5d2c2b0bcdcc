"""Measures one case, on the CPU or on a GPU.

On the CPU memory is measured in a process of its own for each implementation, and times in one process for all. The
processes are this module run with a request (JSON) as its argument; each writes its answer to the file that the request
names. The process for times keeps what is freed: otherwise the next call would pay for handing back what the one before
it held (0.1 s in place of 4 ms after one that held 6 GB).

On a GPU everything is measured in this process: torch's allocator counts what a call takes.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import Bar, Case, Clock, Implementation
from benchmarks.gpu import EventClock
from benchmarks.resident_memory import measure_memory
from benchmarks.timing import HostClock, Row, time_case

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0  # seconds, for one call of one implementation with all that surrounds it, and for one's repeats


@dataclass(frozen=True)
class Settings:
    """How all cases of a run are measured."""

    device: str = "cpu"  # "cpu" or "cuda": which cases, and where they run
    rehearse: bool = False  # the cases of "cuda" on the CPU
    quick: bool = False  # tiny sizes
    threads: int = 2
    repeats: int | None = 7  # of each call; None: as timing.time_case chooses
    rates: dict[str, float] = field(default_factory=dict)  # of the GPU, as gpu.measured_rates gives them
    curve: bool = False  # the cases of a curve over sizes, on the CPU

    def torch_device(self) -> torch.device:
        return torch.device("cpu" if self.rehearse else self.device)

    def clock(self) -> Clock:
        device = self.torch_device()
        return EventClock(device) if device.type == "cuda" else HostClock()


def load_cases(operator: str, settings: Settings) -> tuple[Case, ...]:
    """The cases of ``bench_OPERATOR.py`` for the device, or those of its curve."""
    module = importlib.import_module(f"benchmarks.bench_{operator}")
    if settings.curve:
        cases = module.curve_cases(settings.quick).values()
        return tuple(replace(case, truth=None, floor=None, bars=()) for case in cases)  # time and memory alone
    return tuple((module.cases if settings.device == "cpu" else module.gpu_cases)(settings.quick))


def measure_case(operator: str, index: int, settings: Settings) -> dict[str, Any]:
    """-> {"size", "floor", "rows", "bars"}, and "work" where the case has one; see benchmarks/README.md.

    There is one row for each implementation, ours first.
    """
    case = load_cases(operator, settings)[index]
    if settings.device == "cuda":
        rows, floor_times = _measure_in_this_process(case, settings)
    else:
        rows, floor_times = _measure_in_processes(case, {**asdict(settings), "operator": operator, "index": index})
    return finish(case, rows, floor_times, settings.rates)


def not_measured(case: Case, reason: str) -> dict[str, Any]:
    """The same for a case that was not measured."""
    status = f"not measured: {reason}"
    return finish(case, [row_of(one) | {"status": status} for one in case.implementations], None, {})


def finish(case: Case, rows: list[Row], floor_times: list[float] | None, rates: dict[str, float]) -> dict[str, Any]:
    """Medians, spreads, ratios and shares from the times, and which bars were met."""
    definition = case.floor.definition if case.floor else ""
    floor: Row | None = {"definition": definition, "times": floor_times} if floor_times else None
    for row in [*rows, *([floor] if floor else [])]:
        if "times" in row:
            row["median"] = statistics.median(row["times"])
            quartiles = (
                statistics.quantiles(row["times"], n=4, method="inclusive") if len(row["times"]) > 1 else [0] * 3
            )
            row["interquartile_range"] = quartiles[2] - quartiles[0]
            if case.work and row is not floor and case.work.rate in rates:
                row["share"] = case.work.amount / row["median"] / rates[case.work.rate]
    ours = rows[0].get("median")
    if ours:
        for row in rows[1:]:
            if "median" in row:
                row["ratio"] = row["median"] / ours
        if floor:
            floor["ratio"] = ours / floor["median"]
    bars = [_judge(bar, case, rows, floor) for bar in case.bars]
    work = {"work": asdict(case.work)} if case.work else {}
    return {"size": case.size, "floor": floor, "rows": rows, "bars": bars, **work}


def _judge(bar: Bar, case: Case, rows: list[Row], floor: Row | None) -> dict[str, str]:
    ours = rows[0]
    if bar.faster_than:
        peers = [row for row in rows if row["implementation"] in bar.faster_than]
        ratios = {row["implementation"]: row["ratio"] for row in peers if "ratio" in row}
        best = min(ratios, key=lambda name: ratios[name], default="")
        text = f">= {bar.times:g} x {best or ' or '.join(bar.faster_than)}"
        if best:
            return _outcome(text, f"{ratios[best]:.2f} x", ratios[best] >= bar.times)
        told = peers if ours["status"] == "ok" else [ours]
        return {"bar": text, "measured": "; ".join(row["status"] for row in told), "outcome": "not measured"}
    if bar.share:
        text = f">= {bar.share:.0%} of the {case.work.rate if case.work else ''} rate"
        if "share" in ours:
            return _outcome(text, f"{ours['share']:.0%}", ours["share"] >= bar.share)
        return {"bar": text, "measured": "-", "outcome": "not measured"}
    if bar.floor:
        text, value, limit, unit = f"<= {bar.floor:g} x floor", (floor or {}).get("ratio"), bar.floor, " x"
    elif bar.milliseconds:
        value = None if "median" not in ours else 1e3 * ours["median"]
        text, limit, unit = f"<= {bar.milliseconds:g} ms", bar.milliseconds, " ms"
    elif bar.extra_mib:
        value = None if "extra" not in ours else ours["extra"] / 2**20
        text, limit, unit = f"<= {bar.extra_mib:g} MiB beyond outputs", bar.extra_mib, " MiB"
    else:
        text, value, limit, unit = f"error <= {bar.error:g}", ours.get("errors", {}).get("value"), bar.error, ""
    if value is None:
        return {"bar": text, "measured": "-", "outcome": "not measured"}
    return _outcome(text, f"{value:.3g}{unit}", value <= limit)


def _outcome(text: str, measured: str, met: bool) -> dict[str, str]:
    return {"bar": text, "measured": measured, "outcome": "met" if met else "missed"}


def row_of(implementation: Implementation) -> Row:
    """What an implementation's row holds before anything is measured."""
    row: Row = {"implementation": implementation.name, "note": implementation.note}
    row |= {"same_result": implementation.same_result, "status": "ok"}
    if implementation.package:
        try:
            row["version"] = f"{implementation.package} {version(implementation.package)}"
        except PackageNotFoundError:
            row["status"] = "not installed"
    return row


def _measure_in_this_process(case: Case, settings: Settings) -> tuple[list[Row], list[float] | None]:
    rows = [row_of(one) for one in case.implementations]
    installed = [one for one, row in zip(case.implementations, rows, strict=True) if row["status"] == "ok"]
    answer = time_case(case, installed, settings.torch_device(), settings.clock(), settings.repeats)
    for row in rows:
        row.update(answer["rows"].get(row["implementation"], {}))
    return rows, answer.get("floor")


def _measure_in_processes(case: Case, request: dict[str, Any]) -> tuple[list[Row], list[float] | None]:
    # Memory does not depend on what runs beside it. The sizes of a curve are moderate: two fit into it together.
    with ThreadPoolExecutor(2 if request["curve"] else 1) as pool:
        rows = list(pool.map(lambda one: _memory_row(one, request), case.implementations))
    if not case.timed:
        return rows, None
    names = [row["implementation"] for row in rows if row["status"] == "ok" and _fits(row, request["repeats"])]
    answer = _child({**request, "task": "time", "names": names}, TIMEOUT * (len(names) + 1))
    for row in rows:
        row.update(answer.get("rows", {}).get(row["implementation"], {}))
        if "status" in answer and row["status"] == "ok":
            row["status"] = answer["status"]
        elif row["status"] == "ok" and "times" not in row:
            row["status"] = f"one call took {row['one_call']:.0f} s: not repeated"
    return rows, answer.get("floor")


def _memory_row(implementation: Implementation, request: dict[str, Any]) -> Row:
    row = row_of(implementation)
    if row["status"] == "ok":
        row |= _child({**request, "task": "memory", "names": [implementation.name]}, TIMEOUT)
    return row


def _fits(row: Row, repeats: int) -> bool:
    return bool(row["one_call"] * (repeats + 1) <= TIMEOUT)


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
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return result
    if done.returncode < 0:
        return {"status": f"killed by signal {-done.returncode} (memory, most likely)"}
    return {"status": f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}"}


def _answer(request: dict[str, Any]) -> None:
    """The process's side."""
    settings = Settings(
        quick=request["quick"], threads=request["threads"], repeats=request["repeats"], curve=request["curve"]
    )
    torch.set_num_threads(settings.threads)
    case = load_cases(request["operator"], settings)[request["index"]]
    chosen = [one for one in case.implementations if one.name in request["names"]]
    if request["task"] == "memory":
        answer = measure_memory(case, chosen[0])
    else:
        answer = time_case(case, chosen, settings.torch_device(), settings.clock(), settings.repeats)
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _answer(json.loads(sys.argv[1]))
