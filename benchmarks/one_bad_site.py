"""``python -m benchmarks.one_bad_site RECIPE ...``: what one bad site of five does to a run of ten rounds, by recipe.

In this process, on scikit-learn's digits, with the guard as at sites. The runs of five and of four honest sites, with
three seeds, say how far runs differ anyway. In the others the last site changes its answer in every round (seed 0).
Orchestra's runs differ most: those and one kind of bad answer have ten seeds.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import ROOT
from fedssl.aggregators.weighted_mean import is_statistic
from fedssl.evaluation.evaluate import evaluate_model
from fedssl.federation import Federation, build_federation
from fedssl.guard import CAPPED, REFUSED, reasons_in
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe

FOLDER = ROOT / "benchmarks" / "results" / "one_bad_site"
BAD, SITES, HONEST = 4, range(5), range(4)
SEEDS, MORE_SEEDS = range(3), {"orchestra": range(10)}
TRIMMED = "_trimmed_mean"  # behind a recipe whose weights are joined by it
RECIPES = (
    *("fedbyol", "fedu2", "l_dawa", "fedca", "fedx", "fedema", f"fedema{TRIMMED}", "lw_fedssl"),
    *("orchestra", "hetero_ssfl"),
)
OVERRIDES = (
    *("preset=none", "rounds=10", "device=cpu", "architectures=[small_convnet]", "augmentation={flip: 0}"),
    "data={name: digits, train_limit: 400, test_limit: 700, public_holdout: 100}",
    *("partition={name: iid, clients: 5}", "training={local_epochs: 1, batch_size: 32, learning_rate: 0.1}"),
    *("evaluation={neighbors: 5, linear: {epochs: 100}}", "guard.largest_influence=0.5"),
)
HEADS = ("objective.output_features=32", "objective.hidden_features=64")
MORE = {
    "fedca": (*HEADS, "aggregators.2.epochs=5"),
    "fedx": (),
    f"fedema{TRIMMED}": (*HEADS, "aggregators=[trimmed_mean]"),
    "orchestra": (
        "objective={name: orchestra, clusters: 16, memory: 64, features: 32}",
        "aggregators=[weighted_mean, {name: orchestra_clusters, local_clusters: 8}]",
    ),
    "lw_fedssl": (*HEADS, "schedule={name: layer_wise, layers_per_stage: 2, rounds_per_stage: 5}"),
}
#: what a tensor of an answer becomes, from its name, its value and the server's
Change = Callable[[str, Tensor, Tensor | None], Tensor]


def _is_weight(name: str, tensor: Tensor) -> bool:
    return name.startswith(("online.", "target.")) and not is_statistic(name, tensor)


def _moved(factor: float) -> Change:
    return lambda name, t, server: t if server is None or not _is_weight(name, t) else server + factor * (t - server)


def _means(name: str, tensor: Tensor, server: Tensor | None) -> Tensor:
    return 10 * tensor if name.endswith("running_mean") else tensor


def _noisy(generator: torch.Generator) -> Change:
    def change(name: str, tensor: Tensor, server: Tensor | None) -> Tensor:
        if server is None or not _is_weight(name, tensor):
            return tensor
        noise = torch.randn(tensor.shape, generator=generator)
        return tensor + 30 * noise * (tensor - server).norm() / noise.norm()

    return change


def _representations(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda name, t, server: change(t) if name.startswith(("representation.", "dictionary.")) else t


def _permuted(generator: torch.Generator) -> Change:
    return _representations(lambda rows: rows[torch.randperm(len(rows), generator=generator)])


#: its answer is that of the run of five with seed 1
ANOTHER = "another seed's answer"
#: this one is tried with all of `MORE_SEEDS`
REPEATED = "reversed x4.9"
#: by name what the bad site makes of its answer
CHANGES: dict[str, Callable[[], Change]] = {
    "reversed": lambda: _moved(-1.0),
    "reversed x4.9": lambda: _moved(-4.9),
    "running means x10": lambda: _means,
    "weights + noise 30x": lambda: _noisy(torch.Generator().manual_seed(9)),
    "representations constant": lambda: _representations(lambda rows: rows[:1].repeat(len(rows), 1)),
    "representations x1000": lambda: _representations(lambda rows: 1000 * rows),
    "representations permuted": lambda: _permuted(torch.Generator().manual_seed(3)),
}


def _every_tensor(change: Change) -> Callable[[Message, Message, int], Message]:
    def changed(server: Message, reply: Message, number: int) -> Message:
        return replace(reply, tensors={n: change(n, t, server.tensors.get(n)) for n, t in reply.tensors.items()})

    return changed


def run(federation: Federation, sites: range, bad: Callable[[Message, Message, int], Message]) -> dict[str, Any]:
    """Run all rounds; the accuracies, the honest sites' last loss, and in how many rounds the bad one was named."""
    method, states = federation.method, [Message()] * len(SITES)
    server, named = method.initial_state(), {REFUSED: 0, CAPPED: 0}
    loss = 0.0
    for number in range(0 if method.opening_round else 1, federation.recipe.rounds + 1):
        opened = method.broadcast_opening if number == 0 else None
        sent = opened(server, [*SITES]) if opened else method.broadcast(server, [*SITES], number)
        replies = {}
        for k in sites:
            client = federation.client(k, states[k])
            replies[k] = method.client_round(client, sent[k], number)
            states[k] = federation.client_state(client, number)
        loss = sum(replies[k].metrics.get("loss", 0.0) for k in HONEST) / len(HONEST)
        if BAD in replies:
            replies[BAD] = bad(server, replies[BAD], number)
        server = method.aggregate(server, replies, number, {k: len(federation.client_rows[k]) for k in sites})
        for kind in named:
            assert not reasons_in(server, kind).keys() - {BAD}  # no honest site is ever named
            named[kind] += len(reasons_in(server, kind))
    if method.personal:
        models = [federation.client(k, states[k]).model for k in HONEST]
    else:
        models = [method.load_global(server, lambda: federation.new_model(None))]
    data, options = federation.dataset, federation.recipe.evaluation
    measures = [evaluate_model(model, data, options, 0, linear=True)[0] for model in models]
    knn, linear = (round(sum(m[name] for m in measures) / len(measures), 1) for name in ("knn", "linear"))
    return {"knn": knn, "linear": linear, "loss": round(loss, 3), "refused": named[REFUSED], "capped": named[CAPPED]}


def _keep(kept: dict[int, Message], server: Message, reply: Message, number: int) -> Message:
    """Answer as it is, and remember the answer of each round."""
    return kept.setdefault(number, reply)


def measure(name: str) -> dict[str, dict[str, Any]]:
    """All runs of a recipe by name: `five 0` is that of five honest sites with seed 0."""
    overrides = [*OVERRIDES, *MORE.get(name, HEADS)]
    recipe = name.removesuffix(TRIMMED)
    seeds = MORE_SEEDS.get(name, SEEDS)
    federations = {s: build_federation(load_recipe(recipe, [*overrides, f"seed={s}"])) for s in seeds}
    others: dict[int, Message] = {}
    runs = {}
    for seed, federation in federations.items():
        kept: dict[int, Message] = {}
        runs[f"five {seed}"] = run(federation, SITES, partial(_keep, kept))
        runs[f"four {seed}"] = run(federation, HONEST, lambda server, reply, n: reply)
        others = kept if seed == 1 else others
        if name in MORE_SEEDS and seed:
            runs[f"{REPEATED} {seed}"] = run(federation, SITES, _every_tensor(CHANGES[REPEATED]()))
    names = {name for reply in others.values() for name in reply.tensors}
    for label, make in CHANGES.items():
        what = ("representation.", "dictionary.") if label.startswith("representations") else "online."
        if any(name.startswith(what) for name in names):
            runs[label] = run(federations[0], SITES, _every_tensor(make()))
    if any(name.startswith("online.") for name in names):
        runs[ANOTHER] = run(
            federations[0], SITES, lambda server, reply, n: replace(reply, tensors=reply.tensors | others[n].tensors)
        )
    print(json.dumps({name: runs}), flush=True)
    return runs


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The recipes as Markdown: kNN / linear accuracy in per cent, and in how many rounds the bad site was named."""
    labels = [*CHANGES, ANOTHER]
    lines = [
        "# One bad site of five",
        "",
        "Written by `python -m benchmarks.one_bad_site`, whose first lines say what is done. kNN / linear accuracy in",
        "per cent; r and c: rounds in which the answer was refused, or counted by less (capped).",
        "",
        f"| recipe | without it | {' | '.join(labels)} |",
        "|---|---|" + "---|" * len(labels),
    ]
    for name, runs in results.items():
        honest = _accuracies([runs[key] for key in runs if key.startswith(("five ", "four "))])
        seeds = re.compile(r" \d+$")  # behind a label: of a run with another seed
        cells = [_cell([runs[key] for key in runs if seeds.sub("", key) == label]) for label in labels]
        lines.append(f"| {name} | {honest} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _range(values: list[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _accuracies(runs: list[dict[str, Any]]) -> str:
    return " / ".join(_range([run[what] for run in runs], 1) for what in ("knn", "linear"))


def _cell(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "-"
    counts = {kind[0]: [run[kind] for run in runs] for kind in ("refused", "capped")}
    named = ", ".join(f"{letter} {_range(rounds, 0)}" for letter, rounds in counts.items() if any(rounds))
    return f"{_accuracies(runs)}; {named or 'not named'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_bad_site", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of README.md and results.json")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.recipes if name not in RECIPES]:
        parser.error(f"unknown recipe {unknown[0]}: expected {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "results.json"
    for name in options.recipes or RECIPES:
        results = json.loads(file.read_text()) if file.exists() else {}
        results[name] = measure(name)
        results = {known: results[known] for known in RECIPES if known in results}
        file.write_text(json.dumps(results, indent=1) + "\n")
        (options.output / "README.md").write_text(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
