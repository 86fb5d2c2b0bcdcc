"""What a recipe says of its method: its parts with links, its file, its cost, and the table to choose a method by."""

from __future__ import annotations

import csv
import posixpath
from typing import Any

import yaml

from fedssl.parts import part_class
from fedssl.untrusted import PART_KEYS
from website import parts
from website.repository_files import FOLDER, ROOT

COSTS = "benchmarks/results/method_costs/table.csv"
#: what each aggregator's clients send, in words
SENT = {
    "weighted_mean": "weights",
    "eua": "weights",
    "l_dawa": "weights",
    "trimmed_mean": "weights",
    "representation_mean": "representations of public images",
    "dictionary": "projections of own images",
    "orchestra_clusters": "target networks and cluster centres",
    "base_model": "nothing more (the server sends a base model once)",
}
#: the page of each recipe that is no method's control
PAGES = {
    "hetero_ssfl": "hetero_ssfl",
    "fedu2": "fedu2",
    "lw_fedssl": "lw_fedssl",
    "prog_fedssl": "lw_fedssl",
    "fedbyol": "fedbyol",
    "fedsimsiam": "fedsimsiam",
    "fedsimclr": "fedsimclr",
    "fedmoco_v3": "fedmoco_v3",
    "fedvicreg": "fedvicreg",
    "fedlejepa": "fedlejepa",
    "fedbarlow": "fedbarlow",
    "feddino": "feddino",
    "fedmae": "fedmae",
    "fedu": "fedu",
    "fedema": "fedema",
    "l_dawa": "l_dawa",
    "feddecorr": "feddecorr",
    "fedx": "fedx",
    "orchestra": "orchestra",
    "fedca": "fedca",
    "per_ssfl": "per_ssfl",
    "local_only": "controls",
}


def facts(recipe: str, page: str) -> str:
    """Markdown: a recipe's parts with links to their code, its file, and the commands for its cost and its run."""
    path = ROOT / "fedssl" / "recipes" / f"{recipe}.yaml"
    text = path.read_text(encoding="utf-8")
    rows = []
    for key, folder, part in _parts(yaml.safe_load(text)):
        options = ", ".join(f"`{name}: {_plain(value)}`" for name, value in part.items() if name != "name")
        rows.append(f"| {key} | {parts.link(folder, part['name'])} | {options or '-'} |")
    cost = _cost(recipe)
    source = posixpath.relpath(f"{FOLDER}/{COSTS}.md", posixpath.dirname(page))
    counted = (
        f"With these options and the digits' networks, a client's largest step takes {cost['memory_mb']} MB, and its "
        f"mean round takes {cost['gflops_a_round']} GFLOP, sends {cost['up_mb']} MB and receives {cost['down_mb']} MB "
        f"([counted]({source}) by `python -m website.count_method_costs`)."
        if cost
        else ""
    )
    return "\n".join(
        [
            f"| kind | part of `{recipe}` | options that the recipe sets |",
            "|---|---|---|",
            *rows,
            "",
            f'```yaml title="fedssl/recipes/{recipe}.yaml"\n{text.rstrip()}\n```',
            "",
            "```text",
            f"fedssl show {recipe}     # every option, what it means, where its value comes from",
            f"fedssl cost {recipe}     # a client's memory, operations and traffic, counted before any training",
            f"fedssl run {recipe}      # on scikit-learn's digits",
            "```",
        ]
    ) + (f"\n\n{counted}" if counted else "")


def table() -> str:
    """Markdown: the methods with what a choice depends on."""
    lines = [
        "| method | a client's architecture | what clients send | public images | memory, MB | up, MB | down, MB |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for recipe, page in PAGES.items():
        values = yaml.safe_load((ROOT / "fedssl" / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
        parts_of_recipe = _parts(values)
        sent = [SENT[part["name"]] for key, _, part in parts_of_recipe if key == "aggregators"]
        public = any(
            getattr(part_class(folder, part["name"]), "needs_public_images", False)
            for _, folder, part in parts_of_recipe
        )
        own = values.get("architectures") == "several" or not sent
        cost = _cost(recipe) or dict.fromkeys(("memory_mb", "up_mb", "down_mb"), "-")
        lines.append(
            f"| [`{recipe}`](methods/{page}.md) | {'its own' if own else 'the same for all'} | "
            f"{'; '.join(sent) or 'nothing'} | {'needed' if public else '-'} | "
            f"{cost['memory_mb']} | {cost['up_mb']} | {cost['down_mb']} |"
        )
    return "\n".join(lines)


def _parts(values: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """A recipe's parts: key, folder, and the part as a mapping."""
    result = []
    for key, (folder, _) in PART_KEYS.items():
        given = values.get(key) or []
        for part in given if isinstance(given, list) else [given]:
            result.append((key, folder, {"name": part} if isinstance(part, str) else part))
    return result


def _plain(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True).strip()[1:-1]


def _cost(recipe: str) -> dict[str, str] | None:
    """The counted cost of a recipe, None where it has not been counted."""
    path = ROOT / COSTS
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        return next((row for row in csv.DictReader(file) if row["recipe"] == recipe), None)
