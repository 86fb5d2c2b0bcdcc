"""`report.html`: what one or more runs did, as one page that needs no network, no scripts and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UserError
from ..run_record import Run, read_run
from ..storage import write_atomically
from .collapse import Collapse
from .collapse_files import collapse_of_run
from .collapse_section import collapse_section
from .image_pictures import ImagePictures, image_pictures_of_run
from .image_section import PicturesByMethod, image_section
from .page import PageTable, render_page
from .privacy_section import privacy_table
from .results_section import (
    client_table,
    curve_charts,
    partition_charts,
    results_chart,
    results_table,
    spectrum_chart,
    traffic_table,
)
from .settings_section import differing_settings, folder_table, resolved_recipes, settings_table


def write_report(
    runs: Sequence[Path],
    output: Path | None = None,
    collapse: bool = True,
    trust: bool = False,
    images: bool = True,
) -> Path:
    """Write one page about runs. Runs with the same `name` in their recipe count as seeds of one method.

    Args:
        runs: the runs' folders, finished or not.
        output: the page's file; by default RUN/report.html for one run, and ./report.html for several.
        collapse: also analyse the representations of each method's first finished run, see `collapse_of_run`.
        trust: run the code of parts of one's own that a run's recipe names. Only the collapse analysis and the pictures
            of images need it; without it the page says that they are missing, and why.
        images: also show images of the data as the encoder of each method's first finished run sees them, see
            `image_pictures_of_run`. The page then holds these images.

    Returns:
        The page's file.

    Raises:
        UserError: a folder is not a run's, no run has a finished round, or the output cannot be written.
    """
    if not runs:
        raise UserError("name at least one run's folder, for instance runs/hetero_ssfl-seed0")
    folders = list({path.resolve(): path for path in runs}.values())
    records = [read_run(path) for path in folders]
    if all(run.last_round < 0 for run in records):
        which = f"{folders[0]} has" if len(folders) == 1 else "these runs have"
        raise UserError(f"{which} no finished round to report on yet; continue with fedssl run --resume {folders[0]}")
    path = output or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
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
