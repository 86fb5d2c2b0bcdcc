"""``python -m benchmarks``: measures the operators against their peers and writes the tables.

It measures on the CPU, or on the current GPU with ``--device cuda``; each device has its own sizes and peers. To
compare two states of our own kernels: ``pytest benchmarks``. benchmarks/README.md says more.
"""

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import write
from benchmarks.gpu import measured_rates
from benchmarks.measure import ROOT, Settings, load_cases, measure_case, not_measured

OPERATORS = (
    "info_nce",
    "nt_xent",
    "clip_loss",
    "supervised_contrastive_loss",
    "sigmoid_loss",
    "linear_cka",
    "debiased_cka",
    "accumulate_cka",
    "minibatch_cka",
    "unbalanced_ot",
    "client_weights",
    "delta_gram",
    "apply_deltas",
    "two_views",
)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    repeats = options.repeats or (7 if options.device == "cpu" else None)
    settings = Settings(options.device, options.rehearse, options.quick or options.rehearse, options.threads, repeats)
    folder = options.output or (ROOT / "runs" / "benchmarks" if settings.quick else write.default_folder(settings))
    if settings.device == "cuda":
        settings = replace(settings, rates=measured_rates(settings.torch_device(), settings.clock()))
    start, failed = time.monotonic(), False
    try:
        for operator in options.operators or OPERATORS:
            entry = _measure(operator, settings, options.skip_large, start + options.seconds)
            failed |= any(case["rows"][0]["status"] != "ok" for case in entry["cases"])
            write.merge(folder, operator, entry)
            if settings.device == "cpu" and not (options.output or settings.quick):
                write.update_speed_page(folder, write.SPEED_PAGE)
    except KeyboardInterrupt:
        print(f"interrupted: {operator} was not written", file=sys.stderr)
        return 130
    print(f"written to {folder}")
    return int(failed)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The exit code is 1 where one of our operators could not be measured.",
    )
    names = ", ".join(OPERATORS)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"some of {names} (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument(
        "--threads", type=positive, default=2, metavar="N", help="threads of all libraries (default: 2)"
    )
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help="repeats of each call (default: 7; on a GPU 5 to 50)"
    )
    parser.add_argument("--skip-large", action="store_true", help="leave out the sizes that take minutes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--rehearse", action="store_true", help="with --device cuda: its cases, tiny, on the CPU")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="start no case later than this (default: none)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: benchmarks/results/cpu/PROCESSOR, and the table in docs/speed.md; or gpu/CARD; "
        "runs/benchmarks for tiny sizes)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.operators if name not in OPERATORS]
    if unknown:
        parser.error(f"OPERATOR must be one of {names}, got {unknown[0]}")
    if options.rehearse and options.device != "cuda":
        parser.error("--rehearse needs --device cuda")
    if options.device == "cuda" and not options.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; add --rehearse to run tiny sizes on the CPU")
    return options


def _measure(operator: str, settings: Settings, skip_large: bool, deadline: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"environment": write.environment(settings), "cases": []}
    for index, case in enumerate(load_cases(operator, settings)):
        if case.large and skip_large:
            continue
        print(f"{operator}, {case.size}", flush=True)
        if time.monotonic() > deadline:
            measured = not_measured(case, "no time was left")
        else:
            try:
                measured = measure_case(operator, index, settings)
            except RuntimeError as error:  # the inputs or the truth do not fit into the memory
                measured = not_measured(case, str(error).splitlines()[0][:200])
        for row in measured["rows"]:
            milliseconds = f"{1e3 * row['median']:.3g} ms" if "median" in row else ""
            print(f"    {row['implementation']}: {milliseconds or row['status']}", flush=True)
        for bar in measured["bars"]:
            print(f"    {bar['bar']}: {bar['measured']}, {bar['outcome']}", flush=True)
        entry["cases"].append(measured)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return entry


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
