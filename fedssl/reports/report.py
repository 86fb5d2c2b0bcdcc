"""`report.html`: what one or more runs did, as one page that needs no network, no scripts and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from ..data.partition_chart import draw_partition
from ..errors import UserError
from ..run_record import Run, read_run
from ..storage import write_atomically
from .collapse import Collapse, Geometry, collapse_of_run
from .collapse_plots import draw_log_singular_values, draw_spheres, draw_tsne
from .page import escape, html_figure, html_table, page
from .plots import FINE_TUNED, Bar, draw_bars, draw_curves, draw_spectrum, format_values, method_styles, metric_title

#: measured before and after training, and possibly in between; fine-tuning after it alone
EVALUATED = ("knn", "linear", "semi_supervised_0.01", "semi_supervised_0.1", *FINE_TUNED, "effective_rank")
_TRAFFIC = ("bytes_down", "bytes_up")
_CURVES_FIRST = ("loss", "total_loss", "cka", "knn", "linear", "effective_rank")
_CURVE_NOTES = {
    "loss": "What each client minimises alone. Losses of different objectives do not compare.",
    "cka": "High CKA alone is not success: a collapsed representation aligns perfectly. See the effective rank.",
}
_SETTINGS = (
    "rounds", "clients_per_round", "client_dropout", "architectures", "data", "partition", "objective", "regularizers",
    "schedule", "aggregators", "local_update", "training",
)  # fmt: skip


def write_report(runs: Sequence[Path], output: Path | None = None, collapse: bool = True) -> Path:
    """Write one page about the runs; runs whose recipes have the same `name` are seeds of one method.

    Args:
        runs: run folders, finished or not.
        output: the page's file; RUN/report.html for one run and ./report.html for several where not given.
        collapse: analyse the representations of each method's first finished run, see `collapse_of_run`.

    Raises:
        UserError: a folder that is no run, no run with a finished round, or an output that cannot be written.
    """
    if not runs:
        raise UserError("name at least one run's folder, for instance runs/hetero_ssfl-seed0")
    folders = list({path.resolve(): path for path in runs}.values())
    found = [read_run(path) for path in folders]
    if all(run.last_round < 0 for run in found):
        which = f"{folders[0]} has" if len(folders) == 1 else "these runs have"
        raise UserError(f"{which} no finished round to report on yet; continue with fedssl run --resume {folders[0]}")
    path = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
    write_atomically(path, build_report(found, _analyses(found) if collapse else {}).encode())
    return path


def _analyses(runs: Sequence[Run]) -> dict[str, Collapse | str]:
    """By method: the collapse analysis of its first finished run, or why there is none."""
    found: dict[str, Collapse | str] = {}
    for run in runs:
        if run.finished and run.name not in found:
            try:
                analysis = collapse_of_run(run.path)
            except UserError as error:
                found[run.name] = str(error)
            else:
                if analysis is not None:
                    found[run.name] = analysis
    return found


def build_report(runs: Sequence[Run], analyses: Mapping[str, Collapse | str] | None = None) -> str:
    """The page's HTML; `analyses` by method, a text where one could not be made."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    title = " / ".join(groups) if len(groups) <= 3 else f"{len(groups)} methods compared"
    sections = [
        _what_ran(groups),
        _results(groups),
        _curves(groups),
        _spectra(groups),
        _collapse(analyses or {}),
        _partitions(groups),
        _per_client(groups),
        _traffic(groups),
        _settings(groups),
    ]
    return page(title, "\n".join(section for section in sections if section))


# HTML helpers, also used by the page of a table


# The page's sections


def _what_ran(groups: Mapping[str, list[Run]]) -> str:
    parts = ["<h2>What ran</h2>"]
    for name, runs in groups.items():
        description = " ".join(str(runs[0].recipe.get("description") or "").split())
        parts.append(f"<p><strong>{escape(name)}</strong>{': ' + escape(description) if description else ''}</p>")
    rows = [
        (name, len(runs), ", ".join(str(run.seed) for run in runs), _progress(runs)) for name, runs in groups.items()
    ]
    parts.append(html_table(("method", "runs", "seeds", "state"), rows, text_columns=4))
    for name, runs in groups.items():
        warnings = [text for run in runs if (text := _unfinished(run))] + _doubts(runs)
        parts += [f'<p class="warning">{escape(f"{name}: {text}")}</p>' for text in warnings]
    return "\n".join(parts)


def _progress(runs: Sequence[Run]) -> str:
    finished = sum(run.finished for run in runs)
    rounds = ", ".join(dict.fromkeys(str(run.rounds) for run in runs))
    state = "finished" if finished == len(runs) else f"{finished} of {len(runs)} finished" if finished else "unfinished"
    return f"{state}, {rounds} rounds"


def _unfinished(run: Run) -> str:
    if run.finished:
        return ""
    done = f"{run.last_round} of {run.rounds} rounds" if run.last_round >= 0 else "no round"
    return f"seed {run.seed} is unfinished, {done} done; continue with fedssl run --resume {run.path}"


def _settings(groups: Mapping[str, list[Run]]) -> str:
    """The first runs' settings; methods that share a value share a line."""
    rows: list[tuple[str, str, str]] = []
    for key in _SETTINGS:
        methods: dict[str, list[str]] = {}
        for name, runs in groups.items():
            methods.setdefault(_setting(runs[0].recipe.get(key)), []).append(name)
        if set(methods) == {"-"}:
            continue
        for i, (value, names) in enumerate(methods.items()):
            rows.append(("" if i else key, ", ".join(names) if len(methods) > 1 else "all", value))
    folders = [(name, run.seed, run.path) for name, runs in groups.items() for run in runs]
    recipes = [
        f"<details><summary>Resolved recipe: {escape(name)}, seed {runs[0].seed}</summary><pre>"
        + escape(yaml.safe_dump(dict(runs[0].recipe), sort_keys=False, allow_unicode=True, width=100))
        + "</pre></details>"
        for name, runs in groups.items()
    ]
    return (
        "<h2>Settings</h2>\n"
        + html_table(("setting", "of", "value"), rows, text_columns=3)
        + "<details><summary>Folders</summary>"
        + html_table(("method", "seed", "folder"), folders, text_columns=3)
        + "</details>\n"
        + "\n".join(recipes)
    )


def _doubts(runs: Sequence[Run]) -> list[str]:
    """Why a mean over these runs may not be a mean over seeds of one recipe."""
    doubts = []
    first, *others = (flatten({k: v for k, v in run.recipe.items() if k != "seed"}) for run in runs)
    differing = sorted(
        {key for other in others for key in first.keys() | other.keys() if first.get(key) != other.get(key)}
    )
    if differing:
        doubts.append(f"these runs have one name but differ in {', '.join(differing)}; their mean mixes recipes")
    seeds = [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        doubts.append("several runs have the same seed, so their spread says less than it seems to")
    return doubts


def _setting(value: Any) -> str:
    """A recipe's value in a line or two: parts as `name (key=value, ...)`, options left at None dropped."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return "; ".join(_setting(item) for item in value) or "-"
    if isinstance(value, dict):
        options = ", ".join(f"{k}={_setting(v)}" for k, v in value.items() if k != "name" and v is not None)
        if "name" not in value:
            return options
        return f"{value['name']} ({options})" if options else str(value["name"])
    return str(value)


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted keys, the form of the command line's overrides."""
    if isinstance(values, (dict, list)) and values:
        items = values.items() if isinstance(values, dict) else enumerate(values)
        flat: dict[str, Any] = {}
        for key, value in items:
            flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: values}


def _gather(runs: Sequence[Run], metric: str, when: str, who: str | None = None) -> list[float]:
    """A measure's values over the runs that have it."""
    values = (run.evaluated(metric, when, who) for run in runs)
    return [value for value in values if value is not None]


def _before_and_after(runs: Sequence[Run], metric: str, who: str | None = None) -> str:
    return " → ".join(format_values(metric, _gather(runs, metric, when, who)) for when in ("before", "after"))


def _measured(groups: Mapping[str, list[Run]]) -> list[str]:
    every = [run for runs in groups.values() for run in runs]
    return [m for m in EVALUATED if _gather(every, m, "before") or _gather(every, m, "after")]


def _results(groups: Mapping[str, list[Run]]) -> str:
    metrics = _measured(groups)
    if not metrics:
        return ""
    rows = [
        (name, sum(run.finished for run in runs), *(_before_and_after(runs, m) for m in metrics))
        for name, runs in groups.items()
    ]
    header = ["method", "finished runs", *map(metric_title, metrics)]
    styles = method_styles(list(groups))
    panels = {
        metric: [
            Bar(name, _gather(runs, metric, "before"), _gather(runs, metric, "after"), styles[name].colour)
            for name, runs in groups.items()
        ]
        for metric in metrics
        if metric not in FINE_TUNED or metric == "fine_tune_f1"  # five panels of one thing would be unreadable
    }
    chart = ""
    if sum(run.finished for runs in groups.values() for run in runs) > 1:
        chart = html_figure(draw_bars(panels), "Accuracy and effective rank per method, before and after training")
    return (
        "<h2>Before and after training</h2>\n"
        + chart
        + html_table(header, rows)
        + '<p class="note">Before → after training, of the global model or the mean over the clients\' own models. '
        "Before is round 0, the untrained encoder; after is the last round of finished runs. With several finished "
        "runs: mean ± sample standard deviation over them. kNN and linear accuracy use the labels of the whole "
        "training set, which self-supervised training never sees; the linear classifier is trained afterwards, on "
        "frozen features.</p>"
    )


def _curves(groups: Mapping[str, list[Run]]) -> str:
    logged = {name for runs in groups.values() for run in runs for _, _, name in run.values} - set(_TRAFFIC)
    order = [m for m in _CURVES_FIRST if m in logged] + sorted(logged - set(_CURVES_FIRST))
    styles = method_styles(list(groups))
    charts = []
    for metric in order:
        curves = {name: [c for run in runs if (c := run.overall(metric))] for name, runs in groups.items()}
        # before and after training alone are two points, which the bars show better
        fewest = 3 if metric in EVALUATED else 2
        curves = {name: runs for name, runs in curves.items() if runs and max(map(len, runs)) >= fewest}
        repeats_loss = metric == "total_loss" and all(
            run.overall("total_loss") == run.overall("loss") for runs in groups.values() for run in runs
        )
        if curves and not repeats_loss:
            what = f"{metric_title(metric)} by round"
            charts.append(html_figure(draw_curves(metric, curves, styles), what, _CURVE_NOTES.get(metric, "")))
    if not charts:
        return ""
    return (
        "<h2>Curves</h2>\n<p class=note>Mean over clients (or the global model). With several runs of a method: their "
        f'mean, and the band from the lowest to the highest.</p>\n<div class="charts">{"".join(charts)}</div>'
    )


def _spectra(groups: Mapping[str, list[Run]]) -> str:
    spectra = {
        name: [list(run.spectra.values()) for run in runs if run.finished and run.spectra]
        for name, runs in groups.items()
    }
    spectra = {name: runs for name, runs in spectra.items() if runs}
    if not spectra:
        return ""
    figure = draw_spectrum(spectra, method_styles(list(groups)))
    caption = (
        "Singular values of the centred test representations after training, relative to the largest; geometric mean "
        "over clients and runs. A line that falls off early means a representation collapsed to few directions."
    )
    return "<h2>Spectrum of the representations</h2>\n" + html_figure(figure, "Singular-value spectrum", caption)


def _collapse(analyses: Mapping[str, Collapse | str]) -> str:
    """How the representations of each method's first finished run fill their space."""
    if not analyses:
        return ""
    found = {name: one for name, one in analyses.items() if not isinstance(one, str)}
    parts = ["<h2>Collapse of the representations</h2>"]
    for name, problem in analyses.items():
        if isinstance(problem, str):
            parts.append(f'<p class="warning">{escape(f"{name}: no collapse analysis: {problem}")}</p>')
    if not found:
        return "\n".join(parts)
    rows = []
    for name, one in found.items():
        if one.shared:
            rows.append((name, "global model", *_geometry_cells([one.shared])))
        count = len(one.local)
        if count:
            what = f"mean of {count} local models" if count > 1 else "a local model"
            rows.append((name, what, *_geometry_cells(one.local)))
    parts.append(
        html_table(("method", "model", "alignment", "uniformity", "effective rank", "sphere covered (%)"), rows, 2)
    )
    images = ", ".join(dict.fromkeys(str(len(one.labels)) for one in found.values()))
    parts.append(
        f'<p class="note">Of the l2-normalised representations of {images} test images; of each method the first '
        "finished run. A local model is a client's own right after its training, before the server joins anything. "
        "Alignment: mean squared distance between two augmented views of an image, 0 is perfect. Uniformity: log of "
        "the mean of exp(-2 squared distance) over pairs, the lower the more uniform, 0 is one point (Wang &amp; "
        "Isola 2020). A collapsed representation is perfectly aligned and not uniform: read the two together.</p>"
    )
    figure = draw_log_singular_values(found)
    caption = (
        "The 100 largest singular values of the covariance matrix, natural logarithm. A line that falls off early "
        "means dimensional collapse; the dashed one is what uniform points on the sphere have."
    )
    parts.append(html_figure(figure, "Log singular values of the covariance", caption))
    caption = (
        "Representations projected onto their three main directions and onto the sphere again, coloured by class; "
        "points on the far side are pale. The more of the sphere is blank, the worse the collapse. An encoder that "
        "ends in a ReLU has no negative outputs, so even without collapse its points keep to one side."
    )
    parts.append(html_figure(draw_spheres(found), "Representations on the sphere", caption, png=True))
    tsne = draw_tsne(found)
    if tsne is not None:
        caption = (
            "t-SNE of the same test images as the global model (circles) and one local model (crosses) represent them. "
            "Where both mix, the models share one representation space; distances between groups mean nothing."
        )
        parts.append(html_figure(tsne, "t-SNE of global and local representations", caption, png=True))
    return "\n".join(parts)


def _geometry_cells(models: Sequence[Geometry]) -> list[str]:
    means = (
        fmean(values)
        for values in zip(
            *((m.alignment, m.uniformity, m.effective_rank, 100 * m.coverage) for m in models), strict=True
        )
    )
    return [f"{value:.{decimals}f}" for value, decimals in zip(means, (3, 2, 1, 0), strict=True)]


def _partitions(groups: Mapping[str, list[Run]]) -> str:
    """One chart for each partition that the methods' first runs have."""
    charts: dict[tuple[tuple[int, ...], ...], tuple[Run, list[str]]] = {}
    for name, runs in groups.items():
        run = next((run for run in runs if run.class_counts), None)
        if run is not None:
            key = tuple(map(tuple, run.class_counts))
            charts.setdefault(key, (run, []))[1].append(f"{name} (seed {run.seed})")
    parts = []
    for run, names in charts.values():
        figure = draw_partition(torch.tensor(run.class_counts), list(run.class_names))
        parts.append(
            html_figure(figure, "Training images per client and class", f"Seed {run.seed}: {', '.join(names)}")
        )
    if not parts:
        return ""
    note = '<p class="note">Other seeds deal the images anew.</p>' if any(len(r) > 1 for r in groups.values()) else ""
    return "<h2>Who holds what</h2>\n" + note + "".join(parts)


def _per_client(groups: Mapping[str, list[Run]]) -> str:
    metrics = _measured(groups)
    if not metrics:
        return ""
    rows: list[tuple[object, ...]] = []
    means: dict[int, str] = {}
    for name, runs in groups.items():
        clients = {who for run in runs for _, who, metric in run.values if metric in metrics and who != "mean"}
        for who in sorted(clients, key=lambda who: (not who.isdigit(), int(who) if who.isdigit() else 0)):
            values = (_before_and_after(runs, m, who) for m in metrics)
            client = f"client\u00a0{who}" if who.isdigit() else "global\u00a0model"
            rows.append((name, client, _architecture(runs[0], who), *values))
        values = (_before_and_after(runs, m) for m in metrics)
        if "global" not in clients:
            rows.append((name, "mean", "", *values))
        means[len(rows) - 1] = "mean"
    header = ["method", "model of", "architecture", *map(metric_title, metrics)]
    several = any(len(runs) > 1 for runs in groups.values())
    note = '<p class="note">Client k may hold other classes in each seed.</p>' if several else ""
    return "<h2>Every client</h2>\n" + html_table(header, rows, text_columns=3, classes=means) + note


def _architecture(run: Run, who: str) -> str:
    names = run.recipe.get("architectures") or [""]
    return str(names[int(who) % len(names)] if who.isdigit() else names[0])


def _traffic(groups: Mapping[str, list[Run]]) -> str:
    rows = []
    for name, runs in groups.items():
        for run in runs:
            down, up = run.total("bytes_down"), run.total("bytes_up")
            rows.append((name, run.seed, max(run.last_round, 0), *map(format_bytes, (down, up, down + up))))
    header = ("method", "seed", "rounds", "down to clients", "up to the server", "together")
    return (
        "<h2>Traffic</h2>\n"
        + html_table(header, rows)
        + '<p class="note">Payload over all rounds and clients: tensors and '
        "numbers, without names, framing or compression. 1 MB = 1,000,000 bytes.</p>"
    )


def format_bytes(count: float) -> str:
    """`0`, `812 B`, `4.1 kB`, `20.5 MB`, `1.3 GB`."""
    if count < 1000:
        return f"{count:.0f} B" if count else "0"
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:,.1f} GB"
