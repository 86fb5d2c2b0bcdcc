"""``python -m benchmarks``: measures the operators against their peers and writes the tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import write
from benchmarks.measure import ROOT, load_cases, measure_case

OPERATORS = (
    "info_nce",
    "nt_xent",
    "linear_cka",
    "unbalanced_ot",
    "client_weights",
    "delta_gram",
    "apply_deltas",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "operators", nargs="*", metavar="OPERATOR", help=f"some of {', '.join(OPERATORS)} (default: all)"
    )
    parser.add_argument("--threads", type=_positive, default=2, metavar="N", help="threads of all (default: 2)")
    parser.add_argument("--repeats", type=_positive, default=7, metavar="N", help="repeats of each call (default: 7)")
    parser.add_argument("--skip-large", action="store_true", help="leave out the sizes that take minutes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs; leaves README.md alone")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write (default: benchmarks/results/cpu/PROCESSOR)"
    )
    parser.add_argument("--no-readme", action="store_true", help="leave the table in README.md alone")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.operators if name not in OPERATORS]
    if unknown:
        parser.error(f"operator must be one of {', '.join(OPERATORS)}, got {unknown[0]}")
    folder = options.output or (ROOT / "runs" / "benchmarks" if options.quick else write.default_folder())

    try:
        for operator in options.operators or OPERATORS:
            entry = _measure(operator, options)
            results = write.merge(folder, operator, entry)
            if not (options.no_readme or options.quick):
                write.update_readme(results, folder, write.README)
    except KeyboardInterrupt:
        print(f"interrupted: {operator} was not written", file=sys.stderr)
        return 130
    print(f"written to {folder}")
    return 0


def _measure(operator: str, options: argparse.Namespace) -> dict[str, Any]:
    entry: dict[str, Any] = {"environment": write.environment(options.threads, options.repeats), "cases": []}
    for index, case in enumerate(load_cases(operator, options.quick)):
        if case.large and options.skip_large:
            continue
        print(f"{operator}, {case.size}", flush=True)
        measured = measure_case(operator, index, threads=options.threads, repeats=options.repeats, quick=options.quick)
        for row in measured["rows"]:
            time = f"{1e3 * row['median']:.3g} ms" if "median" in row else ""
            print(f"    {row['implementation']}: {time or row['status']}", flush=True)
        for bar in measured["bars"]:
            print(f"    {bar['bar']}: {bar['measured']}, {bar['outcome']}", flush=True)
        entry["cases"].append(measured)
    return entry


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
