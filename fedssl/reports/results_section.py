"""The report's sections about metrics: results, curves, the spectrum, the partition, every client, and traffic.

Everywhere `methods` are the runs by method: runs with the same name are seeds of one method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from ..data.partition_chart import draw_partition
from ..run_record import Run
from .metrics import EVALUATED, FINE_TUNED, format_values, is_evaluated, metric_title
from .page import PageFigure, PageTable, page_figure
from .plots import Bar, draw_bars, draw_curves, draw_spectrum, method_styles
from .units import format_bytes

_TRAFFIC = ("bytes_down", "bytes_up")
_MOST_CURVES = 40
_FIRST_CURVES = ("loss", "total_loss", "cka", "knn", "linear", "effective_rank")
_CURVE_NOTES = {
    "loss": "What each client minimises alone. Losses of different objectives do not compare.",
    "cka": "High CKA alone is not success: a collapsed representation aligns perfectly. See the effective rank.",
}
_SPECTRUM_CAPTION = (
    "Singular values of the centred test representations after training, relative to the largest; geometric mean over "
    "clients and runs. A line that falls off early means a representation collapsed to few directions."
)


def results_table(methods: Mapping[str, list[Run]]) -> PageTable | None:
    """Each method's metrics before and after training; None where nothing was evaluated."""
    metrics = _evaluated_metrics(methods)
    if not metrics:
        return None
    rows = [
        (name, sum(run.finished for run in runs), *(_before_and_after(runs, metric) for metric in metrics))
        for name, runs in methods.items()
    ]
    return PageTable(["method", "finished runs", *map(metric_title, metrics)], rows)


def results_chart(methods: Mapping[str, list[Run]]) -> PageFigure | None:
    """The results as bars; None where there are fewer than two finished runs to compare."""
    metrics = _evaluated_metrics(methods)
    if not metrics or sum(run.finished for runs in methods.values() for run in runs) < 2:
        return None
    styles = method_styles(list(methods))
    panels = {
        metric: [
            Bar(name, _values(runs, metric, "before"), _values(runs, metric, "after"), styles[name].colour)
            for name, runs in methods.items()
        ]
        for metric in metrics
        if metric not in FINE_TUNED or metric == "fine_tune_f1"  # panels for all five scores would be unreadable
    }
    return page_figure(draw_bars(panels), "Accuracy and effective rank per method, before and after training")


def curve_charts(methods: Mapping[str, list[Run]]) -> list[PageFigure]:
    """A chart of each metric that was logged in several rounds; of many metrics the first ones.

    A client chooses the names of its metrics, so there may be thousands.
    """
    logged = {metric for runs in methods.values() for run in runs for _, _, metric in run.values} - set(_TRAFFIC)
    order = [metric for metric in _FIRST_CURVES if metric in logged] + sorted(logged - set(_FIRST_CURVES))
    styles = method_styles(list(methods))
    charts: list[PageFigure] = []
    for metric in order:
        if len(charts) == _MOST_CURVES:
            note = f"Only {_MOST_CURVES} metrics are drawn; metrics.csv holds all of them."
            charts[-1] = replace(charts[-1], caption=f"{charts[-1].caption} {note}".strip())
            break
        # values before and after training alone are two points, which the bars show better
        fewest = 3 if is_evaluated(metric) else 2
        curves = {name: [curve for run in runs if (curve := run.overall(metric))] for name, runs in methods.items()}
        curves = {name: runs for name, runs in curves.items() if runs and max(map(len, runs)) >= fewest}
        repeats_loss = metric == "total_loss" and all(
            run.overall("total_loss") == run.overall("loss") for runs in methods.values() for run in runs
        )
        if curves and not repeats_loss:
            figure = draw_curves(metric, curves, styles)
            charts.append(page_figure(figure, f"{metric_title(metric)} by round", _CURVE_NOTES.get(metric, "")))
    return charts


def spectrum_chart(methods: Mapping[str, list[Run]]) -> PageFigure | None:
    """The singular values after training; None where no finished run has them."""
    spectra = {
        name: [list(run.spectra.values()) for run in runs if run.finished and run.spectra]
        for name, runs in methods.items()
    }
    spectra = {name: runs for name, runs in spectra.items() if runs}
    if not spectra:
        return None
    figure = draw_spectrum(spectra, method_styles(list(methods)))
    return page_figure(figure, "Singular-value spectrum", _SPECTRUM_CAPTION)


def partition_charts(methods: Mapping[str, list[Run]]) -> list[PageFigure]:
    """A chart for each of the different partitions that the methods' first runs have."""
    charts: dict[tuple[tuple[int, ...], ...], tuple[Run, list[str]]] = {}
    for name, runs in methods.items():
        run = next((run for run in runs if run.class_counts and run.class_names), None)
        if run is not None:
            partition = tuple(map(tuple, run.class_counts))
            charts.setdefault(partition, (run, []))[1].append(f"{name} (seed {run.seed})")
    return [
        page_figure(
            draw_partition(torch.tensor(run.class_counts), list(run.class_names)),
            "Training images per client and class",
            f"Seed {run.seed}: {', '.join(names)}",
        )
        for run, names in charts.values()
    ]


def client_table(methods: Mapping[str, list[Run]]) -> PageTable | None:
    """The metrics of each client's model, or the global one, before and after; None where nothing was evaluated."""
    metrics = _evaluated_metrics(methods)
    if not metrics:
        return None
    rows: list[tuple[object, ...]] = []
    mean_rows: dict[int, str] = {}
    for name, runs in methods.items():
        owners = {who for run in runs for _, who, metric in run.values if metric in metrics and who != "mean"}
        for who in sorted(owners, key=lambda who: (not who.isdigit(), int(who) if who.isdigit() else 0)):
            model = f"client\u00a0{who}" if who.isdigit() else "global\u00a0model"
            architecture = runs[0].architecture_of(int(who) if who.isdigit() else 0)
            rows.append((name, model, architecture, *(_before_and_after(runs, metric, who) for metric in metrics)))
        if "global" not in owners:
            rows.append((name, "mean", "", *(_before_and_after(runs, metric) for metric in metrics)))
        mean_rows[len(rows) - 1] = "mean"
    header = ["method", "model of", "architecture", *map(metric_title, metrics)]
    return PageTable(header, rows, text_columns=3, row_classes=mean_rows)


def traffic_table(methods: Mapping[str, list[Run]]) -> PageTable:
    """What every run sent, over all rounds and clients."""
    rows = []
    for name, runs in methods.items():
        for run in runs:
            down, up = (run.total(metric) for metric in _TRAFFIC)
            rows.append((name, run.seed, max(run.last_round, 0), *map(format_bytes, (down, up, down + up))))
    return PageTable(("method", "seed", "rounds", "down to clients", "up to the server", "together"), rows)


def _evaluated_metrics(methods: Mapping[str, list[Run]]) -> list[str]:
    """The metrics that any run has before or after its training."""
    runs = [run for runs in methods.values() for run in runs]
    downstream = {metric for run in runs for _, _, metric in run.values if is_evaluated(metric)} - set(EVALUATED)
    metrics = [*EVALUATED, *sorted(downstream)]
    return [metric for metric in metrics if _values(runs, metric, "before") or _values(runs, metric, "after")]


def _before_and_after(runs: Sequence[Run], metric: str, who: str | None = None) -> str:
    before, after = _values(runs, metric, "before", who), _values(runs, metric, "after", who)
    return f"{format_values(metric, before)} → {format_values(metric, after)}"


def _values(runs: Sequence[Run], metric: str, when: Literal["before", "after"], who: str | None = None) -> list[float]:
    """A metric's values of the runs that have it, see `Run.evaluated`."""
    values = (run.evaluated(metric, when, who) for run in runs)
    return [value for value in values if value is not None]
