"""`report.html`: what one or more runs did, as one page that needs no network, no scripts and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from ..errors import UserError
from ..evaluation.metrics import EVALUATED, FINE_TUNED, format_values, is_evaluated, metric_title
from ..recipe.overrides import flatten_keys
from ..run.record import Run, read_run
from ..run.storage import write_atomically
from .collapse import Collapse
from .collapse_plots import collapse_of_run, collapse_section
from .cost import format_bytes
from .images import ImagePictures, PicturesByMethod, image_pictures_of_run, image_section
from .page import PageFigure, PageTable, page_figure, render_page
from .plots import Bar, draw_bars, draw_curves, draw_partition, draw_spectrum, method_styles


def write_report(
    runs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    collapse: bool = True,
    images: bool = True,
    trust: bool = False,
) -> Path:
    """Write an HTML page with the curves, tables, partition and representations of one or more runs.

    Runs with the same `name` in their recipe count as seeds of one method.

    Args:
        runs: the folder of a run, finished or not, or several.
        output: the file to write; RUN/report.html by default, or report.html for several runs.
        collapse: also check whether representations have collapsed (each method's first finished run, see
            `collapse_of_run`); this loads the run's images.
        images: also show images of the data as the encoder sees them (each method's first finished run, see
            `image_pictures_of_run`); the page then holds these images.
        trust: run the code of your own parts that a run's recipe names; only the two options above need it, and
            without it the page says that they are missing, and why.

    Returns:
        The file that was written.

    Raises:
        UserError: a folder holds no run, no run has a finished round, or the file cannot be written.
    """
    if not runs:
        raise UserError("name at least one run's folder, for instance runs/hetero_ssfl-seed0")
    paths = [runs] if isinstance(runs, (str, Path)) else runs
    folders = list({path.resolve(): path for path in map(Path, paths)}.values())
    records = [read_run(path) for path in folders]
    if all(run.last_round < 0 for run in records):
        which = f"{folders[0]} has" if len(folders) == 1 else "these runs have"
        raise UserError(f"{which} no finished round to report on yet; continue with fedssl run --resume {folders[0]}")
    path = Path(output or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    analyses = _collapse_analyses(records, trust) if collapse else {}
    pictures = _pictures_of_images(records, trust) if images else {}
    write_atomically(path, build_report(records, analyses, pictures).encode())
    return path


def _pictures_of_images(runs: Sequence[Run], trust: bool) -> PicturesByMethod:
    """By method: the pictures of images of its first finished run, or why there are none."""
    pictures: dict[str, tuple[Path, ImagePictures] | str] = {}
    for run in runs:
        if run.finished and run.name not in pictures:
            try:
                shown = image_pictures_of_run(run.path, trust)
            except UserError as error:
                pictures[run.name] = str(error)
            else:
                if shown is not None:
                    pictures[run.name] = (run.path, shown)
    return pictures


def _collapse_analyses(runs: Sequence[Run], trust: bool) -> dict[str, Collapse | str]:
    """By method: the collapse analysis of its first finished run, or why there is none."""
    analyses: dict[str, Collapse | str] = {}
    for run in runs:
        if run.finished and run.name not in analyses:
            try:
                analysis = collapse_of_run(run.path, trust)
            except UserError as error:
                analyses[run.name] = str(error)
            else:
                if analysis is not None:
                    analyses[run.name] = analysis
    return analyses


def build_report(
    runs: Sequence[Run],
    analyses: Mapping[str, Collapse | str] | None = None,
    pictures: PicturesByMethod | None = None,
) -> str:
    """The page's HTML.

    Args:
        runs: at least one.
        analyses: by method, its collapse analysis, or a text that says why there is none.
        pictures: by method, its pictures of images, or a text that says why there are none.
    """
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.name, []).append(run)
    return render_page(
        "report.html",
        title=" / ".join(methods) if len(methods) <= 3 else f"{len(methods)} methods compared",
        several_seeds=any(len(runs) > 1 for runs in methods.values()),
        descriptions=[(name, _description(runs[0])) for name, runs in methods.items()],
        runs=_run_table(methods),
        warnings=[f"{name}: {warning}" for name, runs in methods.items() for warning in _warnings(runs)],
        results=results_table(methods),
        results_chart=results_chart(methods),
        curves=curve_charts(methods),
        spectrum=spectrum_chart(methods),
        collapse=collapse_section(analyses or {}),
        images=image_section(pictures or {}),
        partitions=partition_charts(methods),
        clients=client_table(methods),
        traffic=traffic_table(methods),
        privacy=privacy_table(methods),
        settings=settings_table(methods),
        folders=folder_table(methods),
        recipes=resolved_recipes(methods),
    )


def _description(run: Run) -> str:
    return " ".join(str(run.recipe.get("description") or "").split())


def _run_table(methods: Mapping[str, list[Run]]) -> PageTable:
    rows = [
        (name, len(runs), ", ".join(str(run.seed) for run in runs), _progress(runs)) for name, runs in methods.items()
    ]
    return PageTable(("method", "runs", "seeds", "state"), rows, text_columns=4)


def _progress(runs: Sequence[Run]) -> str:
    finished = sum(run.finished for run in runs)
    rounds = list(dict.fromkeys(str(run.rounds) for run in runs))
    state = "finished" if finished == len(runs) else f"{finished} of {len(runs)} finished" if finished else "unfinished"
    return f"{state}, {', '.join(rounds)} {'round' if rounds == ['1'] else 'rounds'}"


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Which runs of a method are unfinished, and why their mean may not be a mean over seeds of one recipe."""
    warnings = [_how_to_continue(run) for run in runs if not run.finished]
    differing = differing_settings(runs)
    if differing:
        warnings.append(f"these runs have one name but differ in {', '.join(differing)}; their mean mixes recipes")
    if any(run.evaluated("alignment", "before") is not None for run in runs):
        warnings.append(
            "the images have no class each, so no accuracy can be measured; effective rank, alignment and uniformity "
            "say how the representations fill their space, not how useful they are"
        )
    if len({run.seed for run in runs}) < len(runs):
        warnings.append("several runs have the same seed, so their spread says less than it seems to")
    return warnings


def _how_to_continue(run: Run) -> str:
    done = f"{run.last_round} of {run.rounds} rounds" if run.last_round >= 0 else "no round"
    return f"seed {run.seed} is unfinished, {done} done; continue with fedssl run --resume {run.path}"


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


_SHOWN_KEYS = (
    "rounds", "clients_per_round", "client_dropout", "architectures", "data", "partition", "objective", "regularizers",
    "schedule", "aggregators", "local_update", "training",
)  # fmt: skip


def settings_table(methods: Mapping[str, list[Run]]) -> PageTable:
    """The settings of each method's first run; methods that share a value share a line."""
    rows: list[tuple[str, str, str]] = []
    for key in _SHOWN_KEYS:
        names_by_value: dict[str, list[str]] = {}
        for name, runs in methods.items():
            names_by_value.setdefault(_one_line(runs[0].recipe.get(key)), []).append(name)
        if set(names_by_value) == {"-"}:
            continue
        for i, (value, names) in enumerate(names_by_value.items()):
            rows.append(("" if i else key, ", ".join(names) if len(names_by_value) > 1 else "all", value))
    return PageTable(("setting", "of", "value"), rows, text_columns=3)


def folder_table(methods: Mapping[str, list[Run]]) -> PageTable:
    """Every run's folder."""
    rows = [(name, run.seed, run.path) for name, runs in methods.items() for run in runs]
    return PageTable(("method", "seed", "folder"), rows, text_columns=3)


def resolved_recipes(methods: Mapping[str, list[Run]]) -> list[tuple[str, str]]:
    """The method and seed of each method's first run, and its resolved recipe as YAML."""
    return [
        (
            f"{name}, seed {runs[0].seed}",
            yaml.safe_dump(dict(runs[0].recipe), sort_keys=False, allow_unicode=True, width=100),
        )
        for name, runs in methods.items()
    ]


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The dotted keys, but for the seed, in which the runs' recipes differ; sorted."""
    first, *others = (flatten_keys({k: v for k, v in run.recipe.items() if k != "seed"}) for run in runs)
    return sorted({key for other in others for key in first.keys() | other.keys() if first.get(key) != other.get(key)})


def _one_line(value: Any) -> str:
    """A recipe's value as a line of text: a part as `name (key=value, ...)`; options that are None are left out."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return "; ".join(_one_line(item) for item in value) or "-"
    if isinstance(value, dict):
        options = ", ".join(f"{k}={_one_line(v)}" for k, v in value.items() if k != "name" and v is not None)
        if "name" not in value:
            return options
        return f"{value['name']} ({options})" if options else str(value["name"])
    return str(value)


def privacy_table(methods: Mapping[str, list[Run]]) -> PageTable | None:
    """A line for each run with differential privacy; None where there is no such run."""
    rows = [
        (name, run.seed, *_noise(privacy), f"{_number(privacy.get('delta')):g}", *_spent(run))
        for name, runs in methods.items()
        for run in runs
        if (privacy := _privacy_options(run))
    ]
    if not rows:
        return None
    header = ("method", "seed", "mechanism", "noise", "clipping norm", "delta", "rounds", "smallest epsilon", "largest")
    return PageTable(header, rows, text_columns=4)


def _privacy_options(run: Run) -> Mapping[str, Any]:
    flower = run.recipe.get("flower")
    privacy = flower.get("differential_privacy") if isinstance(flower, dict) else None
    return privacy if isinstance(privacy, dict) else {}


def _noise(privacy: Mapping[str, Any]) -> tuple[str, str, str]:
    norm = f"{_number(privacy.get('clipping_norm')):g}"
    if privacy.get("name") == "fixed_clipping":
        noise = f"by the server, noise multiplier {_number(privacy.get('noise_multiplier')):g}"
    else:
        noise = f"by each client, for epsilon {_number(privacy.get('epsilon')):g} a round"
        if privacy.get("sensitivity") is not None:
            noise += f" at sensitivity {_number(privacy.get('sensitivity')):g}"
    return str(privacy.get("name")), noise, norm


def _spent(run: Run) -> Sequence[object]:
    """The last committed round, and the epsilons of the clients after it."""
    values = [
        epsilon
        for (number, who, metric), epsilon in run.values.items()
        if metric == "epsilon" and number == run.last_round and who.isdigit()
    ]
    if not values:
        return max(run.last_round, 0), "-", "-"
    return run.last_round, f"{min(values):.4g}", f"{max(values):.4g}"


def _number(value: Any) -> float:
    """An option of a stored recipe, which somebody may have written by hand; NaN where it is no number."""
    return float(value) if isinstance(value, int | float) else float("nan")
