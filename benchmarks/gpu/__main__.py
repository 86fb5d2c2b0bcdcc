"""``python -m benchmarks.gpu``: measures the operators on the current GPU and writes the tables."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fedkernels
from benchmarks import write
from benchmarks.gpu.cases import cases
from benchmarks.gpu.measure import card_limits, judge, measure_case
from benchmarks.measure import ROOT

_HEAD = """# Operators on a GPU

Written by `python -m benchmarks.gpu`; [benchmarks/README.md](../../../README.md) says how each column is measured. A
ratio is the peer's time over ours; a share is of the rate that this card reached in the measurement of its limits.
Memory is in MB beyond the outputs. Errors are relative to the largest entry, against float64."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="these alone (default: all)")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="S", help="begin no case after so long")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, to see that all runs")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write (default: benchmarks/results/gpu/CARD)"
    )
    options = parser.parse_args(arguments)
    chosen = cases(options.rehearse)
    names = list(dict.fromkeys(case.operator for case in chosen))
    unknown = [name for name in options.operators if name not in names]
    if unknown:
        parser.error(f"operator must be one of {', '.join(names)}, got {unknown[0]}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --rehearse runs tiny sizes on the CPU")
    device = torch.device("cpu" if options.rehearse else "cuda")
    folder = options.output or (ROOT / "runs" / "gpu-rehearsal" if options.rehearse else default_folder())

    start, failed = time.monotonic(), False
    results: dict[str, Any] = {"environment": environment(device), "limits": card_limits(device), "cases": []}
    for case in chosen:
        if options.operators and case.operator not in options.operators:
            continue
        print(f"{case.operator}, {case.size}", flush=True)
        late = time.monotonic() - start > options.seconds
        try:
            if late:
                raise TimeoutError("no time was left")
            measured = measure_case(case, device, results["limits"])
        except (RuntimeError, TimeoutError) as error:  # the inputs or the truth do not fit
            status = f"not measured: {str(error).splitlines()[0][:200]}"
            ours = {"implementation": case.implementations[0].name, "note": "", "status": status}
            peers = [{"implementation": one.name, "note": "", "status": status} for one in case.implementations[1:]]
            rows = [ours, *peers]
            measured = {"operator": case.operator, "size": case.size, "limit": case.limit, "of_work": "", "rows": rows}
            measured["targets"] = [judge(target, rows, case.limit) for target in case.targets]
            torch.cuda.empty_cache()
        failed |= measured["rows"][0]["status"] != "ok"
        for row in measured["rows"]:
            took = f"{1e3 * row['median']:.4g} ms" if "median" in row else row["status"]
            print(f"    {row['implementation']}: {took}", flush=True)
        for target in measured["targets"]:
            print(f"    {target['target']}: {target['measured']}, {target['outcome']}", flush=True)
        results["cases"].append(measured)
        folder.mkdir(parents=True, exist_ok=True)
        write._replace(folder / "results.json", json.dumps(results, indent=1) + "\n")
        write._replace(folder / "results.md", tables(results))
        gc.collect()
    print(f"written to {folder}")
    return int(failed)


def default_folder() -> Path:
    """benchmarks/results/gpu/NAME-OF-THE-CARD, as on_gpu.sh has it."""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return ROOT / "benchmarks" / "results" / "gpu" / name


def environment(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": "a rehearsal on the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "fedkernels": fedkernels.build_info(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        about |= {"multiprocessors": card.multi_processor_count, "memory": card.total_memory}
    return about


def tables(results: dict[str, Any]) -> str:
    about, limits = results["environment"], results["limits"]
    rates = ", ".join(f"{name} {limits[name] / 1e12:.4g} TFLOP/s" for name in ("bf16", "tf32", "fp32"))
    parts = [
        _HEAD,
        f"{about['date']}, {about['device']}, torch {about['torch']} (CUDA {about['torch_cuda']}), "
        f"Python {about['python']}.",
        f"Limits measured: copy {limits['copy'] / 1e9:.4g} GB/s (read and written), products of 8192^3: {rates}.",
    ]
    for case in results["cases"]:
        lines = [_line(row, case["limit"]) for row in case["rows"]]
        head = ["implementation", "time, ms", "wall, ms", "ratio", "share", "memory", "error", "of gradients", ""]
        parts += [f"## {case['operator']}, {case['size']}", write._table(head, lines)]
        if case["of_work"]:
            parts.append(f"The share counts {case['of_work']}.")
        if case["targets"]:
            bars = [[target["target"], target["measured"], target["outcome"]] for target in case["targets"]]
            parts.append(write._table(["target", "measured", ""], bars))
    return "\n\n".join(parts) + "\n"


def _line(row: dict[str, Any], limit: str) -> list[str]:
    errors = row.get("errors", {})
    remarks = [row["version"]] if "version" in row else []
    remarks += [row["note"]] if row["note"] else []
    if "kernels" in row:
        kernels = ", ".join(row["kernels"])
        remarks.append(f"compiled: {kernels}" if kernels else "no compiled kernel: the reference in plain PyTorch")
    remarks += [f"**{row['status']}**"] if row["status"] != "ok" else []
    return [
        row["implementation"],
        write._time(row),
        write._milliseconds(row["wall"]) if "wall" in row else "-",
        f"{row['ratio']:.2f}" if "ratio" in row else "-",
        f"{row['share']:.0%} of {limit}" if "share" in row else "-",
        f"{row['extra'] / 1e6:.1f}" if "extra" in row else "-",
        write._error(errors.get("value")),
        write._error(errors.get("gradient")),
        "; ".join(remarks),
    ]


if __name__ == "__main__":
    sys.exit(main())
