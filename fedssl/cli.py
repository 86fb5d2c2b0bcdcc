"""The command line. Every user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table as TextTable

from .errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Federated self-supervised learning: run recipes, compare methods, report.",
)
console = Console()

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="for instance training.batch_size=64 seed=1"),
]


@app.command()
def run(
    recipe: Annotated[str | None, typer.Argument(help="a shipped recipe's name, or a .yaml file")] = None,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="the run's folder; runs/NAME-seedN where not given")] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this folder")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace the folder where it exists")] = False,
) -> None:
    """Run a recipe, or continue an interrupted run (fedssl run --resume RUN)."""
    from .engines import engine_of
    from .engines.progress import ProgressBars
    from .reading import load_recipe
    from .run_directory import RunDirectory

    if resume is not None:
        if recipe or output or overwrite:
            raise UserError("--resume takes the run's folder alone: its recipe is stored there")
        path = resume
        RunDirectory.open(path)
        loaded = load_recipe(path / "recipe.yaml")
    else:
        if recipe is None:
            raise UserError("name a recipe (fedssl recipes lists them) or give --resume RUN")
        loaded = load_recipe(recipe, overrides or ())
        path = output or Path("runs") / f"{loaded.name}-seed{loaded.seed}"
    try:
        with ProgressBars(console) as bars:
            if resume is not None:
                directory = engine_of(loaded).resume(path, bars)
            else:
                directory = engine_of(loaded).run(loaded, path, bars, overwrite)
    except KeyboardInterrupt:
        if (path / "recipe.yaml").is_file():
            _print(f"\nStopped. The last complete round is kept; continue with: fedssl run --resume {path}")
        else:
            console.print("\nStopped before the run began; nothing was written.")
        raise typer.Exit(130) from None
    _print_final(directory.read_metrics())
    _print(f"{path}: fedssl report {path} draws it")


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from .reading import load_recipe, recipe_names

    table = TextTable("recipe", "what it is", box=None, pad_edge=False)
    for name in recipe_names():
        table.add_row(name, load_recipe(name).description)
    console.print(table)


@app.command()
def partition(
    recipe: Annotated[str, typer.Argument(help="a shipped recipe's name, or a .yaml file")],
    overrides: Overrides = None,
    chart: Annotated[Path | None, typer.Option(help="also draw it into this image file")] = None,
) -> None:
    """Show which client holds how many images of each class, without training."""
    from .data.datasets import load_dataset
    from .data.partition_table import class_counts, format_partition
    from .data.partitions import partition_indices
    from .reading import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    dataset = load_dataset(loaded.data, loaded.seed)
    rows = partition_indices(dataset.train_labels, loaded.partition, loaded.seed)
    counts = class_counts(dataset.train_labels, rows, len(dataset.class_names))
    _print(format_partition(counts, dataset.class_names))
    if chart is not None:
        from .data.partition_chart import draw_partition

        draw_partition(counts, dataset.class_names).savefig(chart, dpi=150)
        _print(f"drawn: {chart}")


@app.command()
def cost(
    recipe: Annotated[str, typer.Argument(help="a shipped recipe's name, or a .yaml file")],
    overrides: Overrides = None,
    newcomers: Annotated[
        bool, typer.Option(help="as if every client took part for the first time in every round: the most traffic")
    ] = False,
    rounds: Annotated[
        Path | None, typer.Option(help="also write every round of every client into this CSV file")
    ] = None,
) -> None:
    """Tell what a client will need in memory, operations and traffic, without training."""
    from .federation import build_federation
    from .reading import load_recipe
    from .reports.cost import costs_as_csv, estimate, format_costs
    from .storage import write_atomically

    costs = estimate(build_federation(load_recipe(recipe, overrides or ())), newcomers)
    console.print(format_costs(costs), highlight=False)
    _print(
        "Memory: parameters, gradients, optimiser state and what the forward pass keeps, of the largest client's step. "
        "FLOPs: a multiply-add is two; frozen layers and target networks forward only. Traffic of a stage: the mean of "
        "a client's round."
    )
    if rounds is not None:
        write_atomically(rounds, costs_as_csv(costs).encode())
        _print(f"written: {rounds}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    fractions: Annotated[
        list[float] | None,
        typer.Option("--semi-supervised", help="also fine-tune on this fraction of the labels; may be repeated"),
    ] = None,
    fine_tune: Annotated[
        Literal["train", "validation"] | None,
        typer.Option(help="also fine-tune on all labels of these images: macro precision, recall, F1 and accuracy"),
    ] = None,
) -> None:
    """Evaluate a run's last checkpoint: kNN, linear, and fine-tuning where asked."""
    from .evaluation.fine_tune import FineTuneOptions
    from .reports.evaluation import evaluate_run

    options = FineTuneOptions(images=fine_tune) if fine_tune else None
    path = evaluate_run(run, fractions or [], note=_print, fine_tune=options)
    _print(path.read_text(encoding="utf-8").rstrip())
    _print(f"written: {path}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="one or more runs' folders")],
    output: Annotated[Path | None, typer.Option(help="the page; RUN/report.html, or report.html for several")] = None,
    collapse: Annotated[
        bool, typer.Option(help="also look whether representations have collapsed; needs the run's data, some seconds")
    ] = True,
) -> None:
    """Write a page with curves, tables, the partition chart and pictures of the representations."""
    from .reports.report import write_report

    _print(f"written: {write_report(runs, output, collapse)}")


@app.command()
def tables() -> None:
    """List the shipped tables."""
    from .tables.table import load_table, table_names

    table = TextTable("table", "what it compares", box=None, pad_edge=False)
    for name in table_names():
        table.add_row(name, load_table(name).description)
    console.print(table)


@app.command("run-table")
def run_table(
    table: Annotated[str, typer.Argument(help="a shipped table's name, or a .yaml file")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="the table's folder; runs/TABLE where not given")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="cells at a time, each in a process of its own")] = 1,
) -> None:
    """Run a grid of recipes and seeds, resumable cell by cell, and write the table; or count what its rows take."""
    from .tables import runner as table_runner
    from .tables.table import load_table

    loaded = load_table(table)
    path = output or Path("runs") / loaded.name
    if loaded.kind == "resources":
        from .tables.resources import run_resource_table

        run_resource_table(loaded, path, overrides or (), note=_print)
        return
    try:
        table_runner.run_table(loaded, path, overrides or (), jobs=jobs, note=_print)
    except KeyboardInterrupt:
        console.print("\nStopped. Finished cells and rounds are kept; the same command continues.")
        raise typer.Exit(130) from None


@app.command("app")
def flower_app(
    recipe: Annotated[str, typer.Argument(help="a shipped recipe's name, or a .yaml file")],
    folder: Annotated[Path, typer.Argument(help="the app's folder")],
    overrides: Overrides = None,
    output: Annotated[
        str | None, typer.Option(help="the run's folder on the SuperLink's machine; runs/NAME-seedN where not given")
    ] = None,
) -> None:
    """Write the Flower app of a recipe, which flwr run takes across machines (docs/deploy.md)."""
    from .reading import load_recipe

    loaded = load_recipe(recipe, [*(overrides or ()), "engine=flower"])
    _flower("folder").write_app(loaded, folder, output)
    _print(f"written: {folder}; start it with: flwr run {folder} NAME-OF-THE-SUPERLINK")


@app.command()
def superlink(
    folder: Annotated[Path, typer.Argument(help="holds ca.crt, server.crt and server.key; keeps the database")],
    host: Annotated[str, typer.Option(help="the address to listen on; 0.0.0.0 for all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="without TLS and authentication; for tests only")
    ] = False,
) -> None:
    """Start Flower's SuperLink, the server that the sites connect to, with TLS and their authentication."""
    raise typer.Exit(_flower("nodes").superlink(folder, host, port, insecure))


@app.command()
def supernode(
    site: Annotated[Path, typer.Argument(help="the site's YAML file: client, data, architecture, device, state")],
    superlink: Annotated[str, typer.Option(help="the SuperLink's address, host:port")],
    root_certificates: Annotated[Path | None, typer.Option(help="ca.crt of the SuperLink's authority")] = None,
    key: Annotated[Path | None, typer.Option(help="the site's private key")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="without TLS and authentication; for tests only")
    ] = False,
) -> None:
    """Start Flower's SuperNode for this site; it takes part in runs until it is stopped."""
    raise typer.Exit(_flower("nodes").supernode(site, superlink, root_certificates, key, insecure))


def _flower(module: str) -> ModuleType:
    from .engines import flower_module

    return flower_module(module)


@app.command()
def doctor() -> None:
    """Tell what is installed and used; the first thing to look at when something does not work."""
    from .doctor import diagnose

    table = TextTable("what", "finding", box=None, pad_edge=False)
    for what, finding in diagnose():
        table.add_row(what, finding)
    console.print(table)


def _print(text: str) -> None:
    """Plain text: square brackets in a label are no markup, and numbers get no colours."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _print_final(rows: list[tuple[int, str, str, float]]) -> None:
    """The evaluation after the last round, a line a client."""
    if not rows:
        return
    last = max(row[0] for row in rows)
    metrics = ("knn", "linear", "effective_rank")
    values = {(who, metric): value for number, who, metric, value in rows if number == last and metric in metrics}
    table = TextTable("client", "kNN %", "linear %", "effective rank", box=None, pad_edge=False)
    for who in dict.fromkeys(who for who, _ in values):
        table.add_row(who, *(f"{values[who, m]:.1f}" if (who, m) in values else "-" for m in metrics))
    console.print(table)


def main() -> None:
    """Entry point of the `fedssl` command."""
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"fedssl: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
