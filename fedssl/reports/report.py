"""`report.html`: one page about one or more runs, which needs no network, no scripts and no other file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from ..data.files import notify
from ..engines.progress import format_duration
from ..errors import UserError
from ..evaluation.metrics import EVALUATED, METRICS, format_values, is_measure, metric_title
from ..evaluation.verdict import verdict
from ..recipe.overrides import flatten_keys
from ..run_folder.directory import RunDirectory
from ..run_folder.record import Run, read_run, read_spectra
from ..run_folder.storage import make_folder, require_file_name, write_atomically
from ..templates import fill_template
from ..untrusted import printable, quoted
from .cost import format_bytes, format_flops
from .images import draw_pictures
from .plots import Bar, PageFigure, draw_bars, draw_curves, draw_partition, draw_spectra, method_styles, page_figure

#: the runs of each method, by the recipe's name; several runs are the method's seeds
Methods = Mapping[str, Sequence[Run]]
Styles = Mapping[str, dict[str, Any]]
#: of a table, whose header is in the template
Rows = list[tuple[object, ...]]
_TRAFFIC = ("bytes_down", "bytes_up")
_SPENDING = {"FLOPs of a client so far": ("flops",), "bytes that a client received and sent so far": _TRAFFIC}
_MOST_CURVES = 40
_MOST_LEFT_OUT = 100  # lines
_FIRST_CURVES = ("loss", "total_loss", "cka", "knn", "linear", "effective_rank")
_CURVE_NOTES = {
    "loss": "What each client minimises alone. Losses of different objectives do not compare.",
    "cka": "High CKA alone is not success: a collapsed representation aligns perfectly. See the effective rank.",
}


def write_report(
    runs: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    images: bool = True,
    trust: bool = False,
) -> Path:
    """Write an HTML page with the curves, tables, partition and representations of one or more runs.

    Runs with the same `name` in their recipe count as seeds of one method.

    Args:
        runs: the folder of a run, finished or not, or several.
        output: the file to write, which is returned; RUN/report.html by default, or report.html for several runs.
        images: also show images of the data as the encoder sees them (each method's first finished run, see
            `draw_pictures`); the page then holds these images.
        trust: run the code of your own parts that a run's recipe names, also if it has changed since the run; only
            `images` needs that code, and where it is not run the page and a line say what is missing, and why.

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
        raise UserError(f"{which} no finished round to report on yet: {RunDirectory(folders[0]).continued_by}")
    path = Path(output or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    require_file_name(path)
    pictures: dict[str, list[PageFigure]] = {}
    missing: dict[str, str] = {}
    for run in records if images else []:
        if not run.finished or run.name in pictures | missing or not RunDirectory.open(run.path).checkpoint.files:
            continue
        try:
            pictures[run.name] = draw_pictures(run.path, trust)
        except UserError as error:
            missing[run.name] = f"{run.name}: no pictures of images: {error}"
            notify(f"the report shows less of {run.name}: {error}")
    make_folder(path.absolute().parent)
    write_atomically(path, build_report(records, list(chain(*pictures.values())), list(missing.values())).encode())
    return path


def build_report(runs: Sequence[Run], pictures: Sequence[PageFigure] = (), missing: Sequence[str] = ()) -> str:
    """Return the page's HTML, with `pictures` of images, and sentences that say why some are `missing`."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        methods.setdefault(run.name, []).append(run)
    runs, first = list(chain(*methods.values())), [runs[0] for runs in methods.values()]
    finished = [run for runs in methods.values() for run in [run for run in runs if run.finished][:1]]
    metrics, styles = _evaluated_metrics(runs), method_styles(list(methods))
    as_yaml = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True, width=100)
    return fill_template(
        "fedssl.reports",
        "report.html",
        title=" / ".join(methods) if len(methods) <= 3 else f"{len(methods)} methods compared",
        several_seeds=len(runs) > len(methods),
        descriptions=[(run.name, " ".join(str(run.recipe.get("description") or "").split())) for run in first],
        runs=_runs(methods),
        warnings=[f"{name}: {warning}" for name, runs in methods.items() for warning in _warnings(runs)],
        unlike_measures=len(set(map(_measured_images, runs))) > 1,
        metrics=metrics,
        titles=list(map(metric_title, metrics)),
        results=[
            (name, sum(run.finished for run in runs), *(_before_and_after(runs, metric) for metric in metrics))
            for name, runs in methods.items()
        ],
        results_chart=_results_chart(methods, metrics, styles),
        verdicts=[(run.name, sentence) for run in finished for sentence in verdict(run)],
        curves=_curve_charts(methods, styles) + _spending_charts(methods, styles),
        spectra=_spectra_chart(finished),
        images=pictures,
        missing=missing,
        partitions=_partition_charts(methods),
        left_out=_left_out(runs),
        clients=_clients(methods, metrics),
        resources=_resources(runs),
        privacy=_privacy(runs),
        settings=_settings(first),
        history=_history(runs),
        folders=[(run.name, run.seed, printable(run.path)) for run in runs],
        recipes=[(f"{run.name}, seed {run.seed}", as_yaml(dict(run.recipe))) for run in first],
    )


def _runs(methods: Methods) -> Rows:
    rows: Rows = []
    for name, runs in methods.items():
        finished = sum(run.finished for run in runs)
        state = "finished" if finished == len(runs) else f"{finished} of {len(runs)} finished"
        rounds = list(dict.fromkeys(str(run.rounds) for run in runs))
        progress = f"{state if finished else 'unfinished'}, {', '.join(rounds)} round{'s' * (rounds != ['1'])}"
        times, trained, measured = (
            ", ".join(dict.fromkeys(map(of_run, runs)))
            for of_run in (lambda run: format_duration(run.seconds), _trained_images, _measured_images)
        )
        rows.append((name, ", ".join(str(run.seed) for run in runs), progress, times, trained, measured))
    return rows


def _trained_images(run: Run) -> str:
    """Return on how many images a run trains, as far as its clients state them."""
    images, clients = sum(map(sum, run.class_counts)), len(run.class_counts)
    return "-" if not images else f"{images:,} images of {clients} clients" if clients > 1 else f"{images:,} images"


def _measured_images(run: Run) -> str:
    """Return on how many images a run's models are measured, by its recipe."""
    images = flatten_keys(dict(run.recipe)).get("evaluation.images")
    return f"at most {images:,} images" if isinstance(images, int) else "all images"


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Return a method's unfinished runs, and the reasons why their mean may not be a mean over seeds of one recipe."""
    warnings = []
    for run in runs:
        if not run.finished:
            done = f"{run.last_round} of {run.rounds} rounds" if run.last_round >= 0 else "no round"
            how = f"fedssl run --resume {quoted(run.path)}{' evaluation.patience=null' * run.out_of_patience}"
            how = "flwr run of its app continues it" if run.recipe.get("engine") == "flower" else how
            warnings.append(f"seed {run.seed} is unfinished, {done} done: {how}")
    first, *others = (flatten_keys({k: v for k, v in run.recipe.items() if k != "seed"}) for run in runs)
    differing = {key for other in others for key in first.keys() | other.keys() if first.get(key) != other.get(key)}
    if differing:
        keys = ", ".join(sorted(differing))
        warnings.append(f"these runs have one name but differ in {keys}; their mean mixes recipes")
    if any(run.evaluated("alignment", "before") is not None for run in runs):
        warnings.append(
            "the images have no class each, so no accuracy can be measured; effective rank, alignment and uniformity "
            "say how the representations fill their space, not how useful they are"
        )
    if len({run.seed for run in runs}) < len(runs):
        warnings.append("several runs have the same seed, so their spread says less than it seems to")
    return warnings


def _evaluated_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that any run has before or after its training."""
    others = {metric for run in runs for _, _, metric in run.values if is_measure(metric)} - set(EVALUATED)
    metrics = [metric for metric in (*EVALUATED, *sorted(others)) if metric != "viewed_images"]  # it is of the verdict
    return [metric for metric in metrics if _values(runs, metric, "before") or _values(runs, metric, "after")]


def _values(runs: Sequence[Run], metric: str, when: Literal["before", "after"], who: str | None = None) -> list[float]:
    """Return a metric's values of the runs that have it, see `Run.evaluated`."""
    values = (run.evaluated(metric, when, who) for run in runs)
    return [value for value in values if value is not None]


def _before_and_after(runs: Sequence[Run], metric: str, who: str | None = None) -> str:
    before, after = _values(runs, metric, "before", who), _values(runs, metric, "after", who)
    return f"{format_values(metric, before)} → {format_values(metric, after)}"


def _results_chart(methods: Methods, metrics: Sequence[str], styles: Styles) -> PageFigure | None:
    """Return the results as bars; None if there are fewer than two finished runs to compare."""
    if not metrics or sum(run.finished for runs in methods.values() for run in runs) < 2:
        return None
    panels: dict[str, list[Bar]] = {}
    for metric in (m for m in metrics if m not in METRICS or (METRICS[m].in_tables and METRICS[m].in_bars)):
        for name, runs in methods.items():
            before, after = _values(runs, metric, "before"), _values(runs, metric, "after")
            panels.setdefault(metric, []).append(Bar(name, before, after, styles[name]["color"]))
    return page_figure(draw_bars(panels), "Accuracy and effective rank per method, before and after training")


def _curve_charts(methods: Methods, styles: Styles) -> list[PageFigure]:
    """Return a chart of each metric logged in several rounds, up to `_MOST_CURVES`; clients may log thousands."""
    runs = list(chain(*methods.values()))
    logged = {metric for run in runs for _, _, metric in run.values} - set(_TRAFFIC)
    if all(run.overall("total_loss") == run.overall("loss") for run in runs):
        logged.discard("total_loss")
    order = [metric for metric in _FIRST_CURVES if metric in logged] + sorted(logged - set(_FIRST_CURVES))
    charts: list[PageFigure] = []
    for metric in order:
        if len(charts) == _MOST_CURVES:
            note = f"Only {_MOST_CURVES} metrics are drawn; metrics.csv holds all of them."
            charts[-1] = replace(charts[-1], caption=f"{charts[-1].caption} {note}".strip())
            break
        # two points, before and after training, are better shown as bars
        fewest = 3 if is_measure(metric) else 2
        curves = {name: [curve for run in runs if (curve := run.overall(metric))] for name, runs in methods.items()}
        curves = {name: each for name, each in curves.items() if max(map(len, each), default=0) >= fewest}
        constant = all(_is_constant(runs, metric) for runs in methods.values())
        if curves and not constant:
            figure = draw_curves(metric, curves, styles)
            charts.append(page_figure(figure, f"{metric_title(metric)} by round", _CURVE_NOTES.get(metric, "")))
    return charts


def _spending_charts(methods: Methods, styles: Styles) -> list[PageFigure]:
    """Return what several methods reach for what a client has computed and sent by then; none for less than two."""
    charts: list[PageFigure] = []
    for metric in ("knn", "view_retrieval"):
        curves = {name: [run.overall(metric) for run in runs] for name, runs in methods.items()}
        groups = {name: kept for name, each in curves.items() if (kept := [curve for curve in each if len(curve) > 2])}
        if len(groups) < 2:
            continue
        for title, amounts in _SPENDING.items():
            spent = {name: _spent_by_round(methods[name], amounts) for name in groups}
            if all(spent.values()):
                figure = draw_curves(metric, groups, styles, (title, spent))
                charts.append(page_figure(figure, f"{metric_title(metric)} by {title}"))
        break
    return charts


def _spectra_chart(finished: Sequence[Run]) -> PageFigure | None:
    """Return how the representations at the end of each method's first finished run fill their directions."""
    spectra = {run.name: found for run in finished if (found := read_spectra(run.path))}
    return page_figure(draw_spectra(spectra), "Log share of the variance by principal axis") if spectra else None


def _spent_by_round(runs: Sequence[Run], amounts: Sequence[str]) -> dict[int, float]:
    """Return by round the sum of these metrics up to it, a client's mean in the longest run; empty without any."""
    spent, clients = dict.fromkeys(sorted({number for run in runs for number, _, _ in run.values}), 0.0), set()
    for (number, who, metric), value in max(runs, key=lambda run: run.last_round).values.items():
        if metric in amounts and who.isdigit():
            spent[number] += value
            clients.add(who)
    sums = accumulate(value / max(len(clients), 1) for value in spent.values())
    return dict(zip(spent, sums, strict=True)) if clients else {}


def _is_constant(runs: Sequence[Run], metric: str) -> bool:
    """Return whether a metric of bytes, operations or rank kept is the same in several rounds of all these runs."""
    values = [value for run in runs for number, value in run.overall(metric).items() if number]
    counted = metric == "rank_kept" or (metric in METRICS and METRICS[metric].unit in ("bytes", "FLOPs"))
    return counted and len(values) > 1 and len(set(values)) == 1


def _partition_charts(methods: Methods) -> list[PageFigure]:
    """Return a chart for each different partition of the methods' first runs."""
    partitions: dict[tuple[tuple[int, ...], ...], tuple[Run, list[str]]] = {}
    for name, runs in methods.items():
        run = next((run for run in runs if run.class_counts and run.class_names), None)
        if run is not None:
            counts = tuple(map(tuple, run.class_counts))
            partitions.setdefault(counts, (run, []))[1].append(f"{name} (seed {run.seed})")
    charts = []
    for counts, (run, names) in partitions.items():
        caption = ", ".join(names)
        if flatten_keys(dict(run.recipe)).get("partition.name") == "sites":
            if not any(map(sum, counts)):
                continue  # private sites do not say how many images they have
            caption += ": as the sites stated it when the run began; 0 where a site was not there, or has joined later."
        figure = draw_partition(torch.tensor(counts), run.class_names)
        charts.append(page_figure(figure, "Training images per client and class", caption))
    return charts


def _left_out(runs: Sequence[Run]) -> Rows:
    """Return a line for each client and reason of answers that did not count, or not in full."""
    rows: Rows = []
    for run in runs:
        numbers: dict[tuple[int, str], list[int]] = {}
        for number, k, reason in run.refused:
            numbers.setdefault((k, reason), []).append(number)
        for (k, reason), rounds in sorted(numbers.items(), key=lambda entry: (entry[0][0], entry[1])):
            of = f"{len(rounds)} of rounds {rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])
            rows.append((run.name, run.seed, k, of, printable(reason)))
    if len(rows) > _MOST_LEFT_OUT:
        more = f"and {len(rows) - _MOST_LEFT_OUT} more lines: see refused.csv"
        rows = [*rows[:_MOST_LEFT_OUT], ("", "", "", "", more)]
    return rows


def _clients(methods: Methods, metrics: Sequence[str]) -> Rows:
    """Return the metrics of each client's model, and of the global one or the mean, before and after training."""
    rows: Rows = []
    for name, runs in methods.items():
        owners = {who for run in runs for _, who, metric in run.values if metric in metrics and who != "mean"}
        for who in sorted(owners, key=lambda who: (not who.isdigit(), int(who) if who.isdigit() else 0)):
            model = f"client\u00a0{who}" if who.isdigit() else "global\u00a0model"
            architecture = runs[0].architecture_of(int(who) if who.isdigit() else 0)
            rows.append((name, model, architecture, *(_before_and_after(runs, metric, who) for metric in metrics)))
        if "global" not in owners:
            rows.append((name, "mean", "", *(_before_and_after(runs, metric) for metric in metrics)))
    return rows


def _resources(runs: Sequence[Run]) -> Rows:
    """Return the largest memory of a step in any round, and the operations and traffic of all rounds and clients."""
    rows: Rows = []
    for run in runs:
        memory, (down, up) = max(run.overall("memory").values(), default=0.0), map(run.total, _TRAFFIC)
        taken = format_bytes(memory), format_flops(run.total("flops")), *map(format_bytes, (down, up, down + up))
        rows.append((run.name, run.seed, max(run.last_round, 0), *taken))
    return rows


def _settings(first: Sequence[Run]) -> Rows:
    """Return the settings in which the methods' first runs differ; the recipes below have all of them."""
    recipes = [flatten_keys(dict(run.recipe)) for run in first]
    rows = [(key, *(str(recipe.get(key, "-")) for recipe in recipes)) for key in dict.fromkeys(chain(*recipes))]
    return [row for row in rows if len(set(row[1:])) > 1 and row[0] not in ("name", "seed", "description")]


def _history(runs: Sequence[Run]) -> Rows:
    """Return a line for each option that was changed when a run went on."""
    columns = ("round", "option", "before", "after", "when", "version")
    return [(run.name, run.seed, *(change.get(c, "") for c in columns)) for run in runs for change in run.history]


def _privacy(runs: Sequence[Run]) -> Rows:
    """Return a line for each run with differential privacy: its options, and the clients' epsilon."""
    rows: Rows = []
    for run in runs:
        flower, last = run.recipe.get("flower"), run.last_round
        privacy = flower.get("differential_privacy") if isinstance(flower, dict) else None
        if isinstance(privacy, dict) and privacy:
            options = ", ".join(f"{key}={value}" for key, value in privacy.items() if value is not None)
            spent = [v for (n, who, m), v in run.values.items() if (n, m) == (last, "epsilon") and who.isdigit()]
            bounds = (f"{bound(spent):.4g}" if spent else "-" for bound in (min, max))
            rows.append((run.name, run.seed, options, max(last, 0), *bounds))
    return rows
