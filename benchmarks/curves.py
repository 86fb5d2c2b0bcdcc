"""``python -m benchmarks.curves``: the operators and their peers over sizes, as curves of time and memory on the CPU.

For each operator it writes OPERATOR.csv and OPERATOR.svg, which the operator's page of docs/operators/ shows. The sizes
are those of ``curve_cases`` in bench_OPERATOR.py, and everything is measured as ``python -m benchmarks`` measures it.
"""

import argparse
import csv
import importlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import write
from benchmarks.__main__ import positive
from benchmarks.measure import ROOT, Settings, load_cases, measure_case

OPERATORS = (
    *("info_nce", "nt_xent", "clip_loss", "sigmoid_loss", "supervised_contrastive_loss", "linear_cka"),
    *("unbalanced_ot", "client_weights", "delta_gram", "two_views"),
)
COLUMNS = (
    *("size", "implementation", "milliseconds", "interquartile_range_ms", "beyond_outputs_mib", "status"),
    *("same_result", "version", "case", "date", "processor", "threads", "repeats", "torch"),
)

Point = dict[str, Any]  # a line of the CSV file: one implementation at one size


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    settings = Settings(quick=options.quick, threads=options.threads, repeats=options.repeats, curve=True)
    folder = options.output or (ROOT / "runs" / "curves" if options.quick else _default_folder(settings))
    for operator in options.operators or OPERATORS:
        points = measure(operator, settings)
        folder.mkdir(parents=True, exist_ok=True)
        write.replace(folder / f"{operator}.csv", as_csv(points))
        write.replace(folder / f"{operator}.svg", drawing(operator, points))
    print(f"written to {folder}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(OPERATORS)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"some of {names} (default: all)")
    parser.add_argument(
        "--threads", type=positive, default=2, metavar="N", help="threads of all libraries (default: 2)"
    )
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="repeats of each call (default: 3)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write (default: benchmarks/results/curves/PROCESSOR; runs/curves for tiny sizes)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.operators if name not in OPERATORS]
    if unknown:
        parser.error(f"OPERATOR must be one of {names}, got {unknown[0]}")
    return options


def _default_folder(settings: Settings) -> Path:
    return ROOT / "benchmarks" / "results" / "curves" / write.default_folder(settings).name


def measure(operator: str, settings: Settings) -> list[Point]:
    """-> the points of all sizes and implementations, ours first at each size."""
    environment = write.environment(settings)
    about = {key: environment[key] for key in ("date", "processor", "threads", "repeats", "torch")}
    sizes = importlib.import_module(f"benchmarks.bench_{operator}").curve_cases(settings.quick)
    points = []
    for index, (size, case) in enumerate(zip(sizes, load_cases(operator, settings), strict=True)):
        print(f"{operator}, {case.size}", flush=True)
        for row in measure_case(operator, index, settings)["rows"]:
            points.append({"size": size, "case": case.size, **_figures(row), **about})
            print(f"    {row['implementation']}: {points[-1]['milliseconds'] or row['status']}", flush=True)
    return points


def _figures(row: dict[str, Any]) -> Point:
    timed = "median" in row
    return {
        "implementation": row["implementation"],
        "milliseconds": f"{1e3 * row['median']:.4g}" if timed else "",
        "interquartile_range_ms": f"{1e3 * row['interquartile_range']:.2g}" if timed else "",
        "beyond_outputs_mib": f"{row['extra'] / 2**20:.1f}" if "extra" in row else "",
        "status": row["status"],
        "same_result": row["same_result"],
        "version": row.get("version", ""),
    }


def as_csv(points: Sequence[Point]) -> str:
    text = io.StringIO()
    lines = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    lines.writeheader()
    lines.writerows(points)
    return text.getvalue()


def drawing(operator: str, points: Sequence[Point]) -> str:
    """SVG: time and memory over the size, both on logarithmic axes, one line for each implementation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    label = importlib.import_module(f"benchmarks.bench_{operator}").CURVE
    settings: dict[Any, Any] = {"svg.hashsalt": operator, "svg.fonttype": "none", "font.size": 9.0}
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        panels = (("milliseconds", "ms"), ("beyond_outputs_mib", "MiB beyond the outputs"))
        for panel, (column, unit) in zip(axes, panels, strict=True):
            _draw_panel(panel, column, points)
            panel.set(xlabel=label, ylabel=unit, xscale="log", yscale="log")
            panel.set_xticks(ticks := sorted({point["size"] for point in points}), map(str, ticks), minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return text.getvalue()


def _draw_panel(panel: Any, column: str, points: Sequence[Point]) -> None:
    smallest = 0.1  # MiB: a line on a logarithmic axis has no 0
    for index, name in enumerate(dict.fromkeys(point["implementation"] for point in points)):
        known = [point for point in points if point["implementation"] == name and point[column]]
        values = [max(float(point[column]), smallest if column != "milliseconds" else 0.0) for point in known]
        same = all(point["same_result"] for point in known)
        panel.plot(
            [point["size"] for point in known],
            values,
            marker="o",
            markersize=3.5,
            linewidth=2.2 if index == 0 else 1.2,
            linestyle="-" if same else ":",
            label=name if same else f"{name} (another result)",
        )


if __name__ == "__main__":
    sys.exit(main())
