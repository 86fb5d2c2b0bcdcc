"""Commands that train: one run, or a table of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as TextTable

from ..errors import UserError
from .console import Overrides, Trust, console, print_text


def run(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or path of a .yaml file.")
    ] = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME-seedN by default.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this folder; of its keys, only clients_parallel=N may be given anew."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in the folder if there is one.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Run a recipe, or continue an interrupted run (fedssl run --resume RUN)."""
    from ..engines import engine_of
    from ..engines.progress import ProgressBars
    from ..reading import load_recipe, load_stored_recipe
    from ..run_directory import RunDirectory
    from ..run_folder.creation import default_folder

    if resume is not None:
        if output or overwrite:
            raise UserError("--resume takes neither --output nor --overwrite: the run continues in its own folder")
        path, at_a_time = resume, _clients_parallel([*([recipe] if recipe else []), *(overrides or ())])
        loaded = load_stored_recipe(RunDirectory.open(path), trust, resuming=True)
    else:
        if recipe is None:
            raise UserError("name a recipe (fedssl recipes lists them) or give --resume RUN")
        loaded = load_recipe(recipe, overrides or ())
        path = output or default_folder(loaded.name, loaded.seed)
        if loaded.preset != "none":
            print_text(
                f"Preset {loaded.preset} fills in what the recipe leaves open; `fedssl show` tells what and why."
            )
    try:
        with ProgressBars(console) as bars:
            if resume is not None:
                directory = engine_of(loaded).resume(path, bars, trust, at_a_time)
            else:
                directory = engine_of(loaded).run(loaded, path, bars, overwrite)
    except KeyboardInterrupt:
        if (path / "recipe.yaml").is_file():
            print_text(f"\nStopped. The last complete round is kept; continue with: fedssl run --resume {path}")
        else:
            print_text("\nStopped before the run began; nothing was written.")
        raise typer.Exit(130) from None
    _print_final_evaluation(directory.read_metrics())
    print_text(f"The run is in {path}; write its report with: fedssl report {path}")


def _clients_parallel(arguments: list[str]) -> int | None:
    """What `fedssl run --resume RUN clients_parallel=N` asks for; no other key may change during a run."""
    number = None
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != "clients_parallel":
            raise UserError(
                f"--resume takes only the run's folder and clients_parallel=N, got {argument!r}: the recipe is stored "
                "in the folder, and the run continues as it began"
            )
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"clients_parallel must be a whole number of at least 1, got {value!r}")
        number = int(value)
    return number


def run_table(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of a shipped table, or path of a .yaml file.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the table; runs/TABLE by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many cells run at a time, each in its own process.")] = 1,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only list the runs, their cost in FLOPs and in hours on this machine, and the paper's figures.",
        ),
    ] = False,
) -> None:
    """Run every recipe of a table with every seed, and write the table.

    The same command continues an interrupted table; finished cells are kept. A table of kind `resources` trains
    nothing and counts what each row needs.
    """
    from ..tables import runner as table_runner
    from ..tables.table import load_table

    loaded = load_table(table)
    if dry:
        from ..tables.dry_run import dry_run

        dry_run(loaded, overrides or (), note=print_text)
        return
    path = output or Path("runs") / loaded.name
    if loaded.kind == "resources":
        from ..tables.resources import run_resource_table

        run_resource_table(loaded, path, overrides or (), note=print_text)
        return
    try:
        table_runner.run_table(loaded, path, overrides or (), jobs=jobs, note=print_text)
    except KeyboardInterrupt:
        console.print("\nStopped. Finished cells and rounds are kept; the same command continues.")
        raise typer.Exit(130) from None


def _print_final_evaluation(rows: list[tuple[int, str, str, float]]) -> None:
    """Print the evaluation after the last round, one line for each client."""
    if not rows:
        return
    last_round = max(row[0] for row in rows)
    titles = {"knn": "kNN %", "linear": "linear %", "effective_rank": "effective rank"}
    without_labels = {"alignment": "alignment", "uniformity": "uniformity"}
    values = {(who, metric): value for number, who, metric, value in rows if number == last_round}
    if any(metric in without_labels for _, metric in values):
        titles = {"linear_auroc": "linear AUROC %", "effective_rank": "effective rank"} | without_labels
        titles = {metric: title for metric, title in titles.items() if any(metric == name for _, name in values)}
    clients = dict.fromkeys(who for who, metric in values if metric in titles)
    table = TextTable("client", *titles.values(), box=None, pad_edge=False)
    for who in clients:
        cells = [f"{values[who, m]:.{2 if m in without_labels else 1}f}" if (who, m) in values else "-" for m in titles]
        table.add_row(who, *cells)
    console.print(table)
