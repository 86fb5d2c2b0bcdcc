"""Commands that show what there is, or what a recipe will do. Those that only list import no torch, to be fast."""

import importlib.metadata
import itertools
import os
import platform
from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Literal

import yaml
from rich.table import Table as TextTable
from rich.text import Text
from typer import Option

from ..errors import UserError, installed_distribution
from .console import Overrides, RecipeName, Trust, console, print_next, print_text

REQUIRED = ("torch", "torchvision", "timm", "numpy", "pydantic", "scikit-learn", "safetensors", "matplotlib")
OPTIONAL = ("onnx", "onnxruntime", "flwr")


def recipes() -> None:
    """List the shipped recipes by paper; `fedssl show RECIPE` tells more of one."""
    _print_shipped("recipe")
    print_next("show", "fedbyol")


def tables() -> None:
    """List the shipped tables of runs by paper."""
    _print_shipped("table")
    print_next("run-table", "fedu2_cifar10_small", "--dry-run")


def presets() -> None:
    """List the presets: settings for a kind of data or of a paper, which a recipe takes where it leaves them open.

    Without preset=NAME, a recipe takes the preset for its data.
    """
    from ..recipe.presets import preset_names, read_preset

    for position, name in enumerate(preset_names()):
        preset = read_preset(name)
        if position:
            console.print()
        console.print(Text(name, style="bold"))
        _print_wrapped(f"    For {preset.description}." if ":" not in name else f"    {preset.description}.", "")
        _print_wrapped(f"    {' '.join(preset.source.split())}", "dim")
    print_next("show", "fedbyol", f"preset={preset_names()[0]}")


def show(
    recipe: RecipeName,
    overrides: Overrides = None,
    as_yaml: Annotated[
        bool, Option("--yaml", help="Print a recipe file that `fedssl run` takes, with every default filled in.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Show every setting of a recipe: its value, where the value comes from, and what it means.

    A value comes from the recipe, from an override (KEY=VALUE), from the preset for the data, or is the default. Each
    key and value is checked by itself; whether they go together is checked by `fedssl run`.
    """
    from ..recipe.show import resolve_recipe

    resolved, settings, preset = resolve_recipe(recipe, overrides or (), trust=trust)
    if as_yaml:
        print_text(resolved.to_yaml().rstrip("\n"))
        return
    if preset:
        _print_wrapped(f"Preset {' '.join(preset)}", "bold")
    section = ""
    for setting in settings:
        if setting.section != section:
            section = setting.section
            console.print()
        key = f"{section}.{setting.key}" if section else setting.key
        flow = yaml.safe_dump([setting.value], default_flow_style=True, allow_unicode=True, width=10**6).strip()
        style = "bold" if setting.origin == "override" else ""
        _print_wrapped(f"{key} = {flow[1:-1]}  ({setting.origin})", style)
        _print_wrapped(f"    {setting.description} [{setting.allowed}]", "dim")
    print_next("partition", recipe, overrides=overrides, trust=trust)


def doctor() -> None:
    """Show what is installed and used, and test the CUDA kernels. Look here first if something does not work."""
    import torch

    import fedkernels

    table = TextTable("what", "finding", box=None, pad_edge=False)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in (installed_distribution(), *REQUIRED, *OPTIONAL):
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    table.add_row("processor", f"{os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads")
    table.add_row("vector instructions", torch.backends.cpu.get_cpu_capability())
    if torch.cuda.is_available():
        console.print("Testing the CUDA kernels on each kind of GPU, which takes seconds to a few minutes:")
        fedkernels.self_test()
        console.print()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        table.add_row("cuda", f"{torch.version.cuda}: {', '.join(names)}")
    else:
        table.add_row("cuda", "no device; everything runs on the processor")
    for what, finding in fedkernels.build_info().items():
        if finding:
            table.add_row(f"fedkernels, {what}", finding)
    console.print(table)
    print_next("recipes")


def _print_wrapped(text: str, style: str) -> None:
    for line in wrap(text, console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False):
        console.print(Text(line, style), soft_wrap=True)


def _print_shipped(kind: Literal["recipe", "table"]) -> None:
    """Print one line for each shipped recipe or table, under the paper that it comes from."""
    from ..recipe.overrides import read_values, shipped_names

    papers: dict[str, list[tuple[str, str]]] = {}
    for name in shipped_names(kind):
        # the first sentence of a shipped description is `Paper (Authors Year): summary.`
        paper, _, rest = " ".join(read_values(name, kind)["description"].split()).partition(": ")
        papers.setdefault(paper, []).append((name, rest.partition(". ")[0].rstrip(".")))
    width = max(len(name) for names in papers.values() for name, _ in names)
    for position, paper in enumerate(sorted(papers, key=str.casefold)):
        if position:
            console.print()
        console.print(Text(paper, style="bold"))
        for name, summary in papers[paper]:
            print_text(f"  {name:<{width}}  {summary}")


def partition(recipe: RecipeName, overrides: Overrides = None, trust: Trust = False) -> None:
    """Show how many images of each class every client holds, without training."""
    from ..data.datasets import load_dataset
    from ..data.partitions import class_counts, deal, format_partition
    from ..recipe.reading import load_recipe

    loaded = load_recipe(recipe, overrides or (), trust=trust)
    if loaded.partition.name == "sites":
        raise UserError("partition sites deals no images: each site brings its own, whose number it alone knows")
    dataset = load_dataset(loaded.data, loaded.seed)
    rows = deal(dataset, loaded.partition, loaded.seed)
    counts = class_counts(dataset.train_labels, rows, len(dataset.counted_as))
    print_text(format_partition(counts, dataset.counted_as))
    _print_next_run(recipe, loaded.engine, overrides, trust)


def cost(
    recipe: RecipeName,
    overrides: Overrides = None,
    rounds: Annotated[
        Path | None, Option(help="Also write the figures of every client in every round into this CSV file.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Show what a client will need in memory, operations and traffic, without training."""
    from ..federation import build_federation
    from ..recipe.reading import load_recipe
    from ..reports.cost import costs_as_csv, estimate, format_costs
    from ..run_folder.storage import make_folder, require_file_name, write_atomically

    if rounds is not None:
        require_file_name(rounds)
    loaded = load_recipe(recipe, overrides or (), trust=trust)
    costs = estimate(build_federation(loaded))
    console.print(format_costs(costs), highlight=False)
    print_text(
        "Memory is that of the largest client's step: parameters, gradients, optimiser state and what the forward pass "
        "keeps. A multiply-add is two FLOPs; frozen layers and target networks have a forward pass only. The traffic "
        "of a stage is the mean over its clients' rounds."
    )
    if rounds is not None:
        make_folder(rounds.absolute().parent)
        write_atomically(rounds, costs_as_csv(costs).encode())
        print_text(f"The figures of every round are in {rounds}")
    _print_next_run(recipe, loaded.engine, overrides, trust)


def privacy(recipe: RecipeName, overrides: Overrides = None, trust: Trust = False) -> None:
    """Show how much privacy a recipe with differential privacy will spend of each client, without training.

    Of a recipe whose clients send representations it says what the server and the other clients can compute of them.
    """
    from ..recipe.reading import load_recipe

    loaded = load_recipe(recipe, overrides or (), trust=trust)
    options = loaded.flower.differential_privacy
    told = [text for part in loaded.aggregators if (text := part.disclosure(loaded.partition.clients))]
    for text in told:
        print_text(text)
    if options is None and told:
        print_text("Such a recipe cannot have differential privacy, so no epsilon is counted (docs/privacy.md).")
        _print_next_run(recipe, loaded.engine, overrides, trust)
        return
    if options is None:
        raise UserError(
            "the recipe has no differential privacy, so there is nothing to count: set flower.differential_privacy, "
            "for instance engine=flower flower.differential_privacy='{name: fixed_clipping, clipping_norm: 1, "
            "noise_multiplier: 2}' (docs/privacy.md)"
        )
    from ..engines.flower.privacy_accountant import epsilon_after, noise_multiplier, rounds_within
    from ..federation import build_federation

    federation = build_federation(loaded)
    parts = (federation.answering_clients(r, federation.sampled_clients(r)) for r in range(1, loaded.rounds + 1))
    asked = Counter(itertools.chain.from_iterable(parts))
    rounds = {k: asked[k] for k in range(loaded.partition.clients)}
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
    _print_next_run(recipe, loaded.engine, overrides, trust)


def _print_next_run(recipe: str, engine: str, overrides: list[str] | None, trust: bool) -> None:
    command = ["app", recipe, "app"] if engine == "flower" else ["run", recipe]  # started from its app's folder
    print_next(*command, overrides=overrides, trust=trust)
