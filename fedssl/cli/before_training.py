"""Commands that tell what a recipe would do, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from .console import Overrides, RecipeName, console, print_text


def partition(
    recipe: RecipeName,
    overrides: Overrides = None,
    chart: Annotated[Path | None, typer.Option(help="Also draw the table into this image file.")] = None,
) -> None:
    """Show how many images of each class every client holds, without training."""
    from ..data.datasets import load_dataset
    from ..data.dealing import deal
    from ..data.partition_table import class_counts, format_partition
    from ..reading import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    dataset = load_dataset(loaded.data, loaded.seed)
    rows = deal(dataset, loaded.partition, loaded.seed)
    counts = class_counts(dataset.train_labels, rows, len(dataset.counted_as))
    print_text(format_partition(counts, dataset.counted_as))
    if chart is not None:
        from ..data.partition_chart import draw_partition
        from ..reports.plots import write_figure

        write_figure(chart, draw_partition(counts, dataset.counted_as))
        print_text(f"The chart is in {chart}")


def cost(
    recipe: RecipeName,
    overrides: Overrides = None,
    newcomers: Annotated[
        bool,
        typer.Option(
            "--newcomers",
            help="Count every client as taking part for the first time in every round, which gives the most traffic.",
        ),
    ] = False,
    rounds: Annotated[
        Path | None, typer.Option(help="Also write the figures of every client in every round into this CSV file.")
    ] = None,
) -> None:
    """Show what a client will need in memory, operations and traffic, without training."""
    from ..federation import build_federation
    from ..reading import load_recipe
    from ..reports.cost import costs_as_csv, estimate, format_costs
    from ..storage import write_atomically

    costs = estimate(build_federation(load_recipe(recipe, overrides or ())), newcomers)
    console.print(format_costs(costs), highlight=False)
    print_text(
        "Memory is that of the largest client's step: parameters, gradients, optimiser state and what the forward pass "
        "keeps. A multiply-add is two FLOPs; frozen layers and target networks have a forward pass only. The traffic "
        "of a stage is the mean over its clients' rounds."
    )
    if rounds is not None:
        write_atomically(rounds, costs_as_csv(costs).encode())
        print_text(f"The figures of every round are in {rounds}")


def privacy(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Show how much privacy a recipe with differential privacy will spend of each client, without training."""
    from rich.table import Table as TextTable

    from ..engines.flower.privacy_accountant import epsilon_after, foretold_rounds, noise_multiplier, rounds_within
    from ..federation import build_federation
    from ..reading import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    options = loaded.flower.differential_privacy
    if options is None:
        raise UserError(
            "the recipe has no differential privacy, so there is nothing to count: set flower.differential_privacy, "
            "for instance engine=flower flower.differential_privacy='{name: fixed_clipping, clipping_norm: 1, "
            "noise_multiplier: 2}' (docs/deploy.md)"
        )
    federation = build_federation(loaded)
    parts = [federation.answering_clients(r, federation.sampled_clients(r)) for r in range(1, loaded.rounds + 1)]
    rounds = foretold_rounds(loaded, parts)
    table = TextTable("rounds of", "clients", f"epsilon at delta {options.delta:g}")
    for count in sorted(set(rounds.values())):
        clients = ", ".join(str(k) for k in rounds if rounds[k] == count)
        table.add_row(str(count), clients, f"{epsilon_after(options, count):.6g}")
    console.print(table, highlight=False)
    print_text(
        f"{options.name}: an update is clipped to the L2 norm {options.clipping_norm:g}. The noise's deviation is "
        f"{noise_multiplier(options):.4g} times the distance of two clipped updates, which is twice that norm. The "
        "count is for a run in which every client answers each time that it is asked."
    )
    budget = loaded.flower.epsilon_budget
    if budget is not None:
        allowed, needed = rounds_within(options, budget, loaded.rounds), max(rounds.values())
        enough = "enough" if allowed >= needed else f"too little: a client is asked in {needed} rounds"
        print_text(f"flower.epsilon_budget {budget:g} allows {allowed} rounds of a client, which is {enough}.")
