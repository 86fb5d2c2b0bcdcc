"""What a recipe says of its method: its parts with links, its file, its cost, and the table to choose a method by."""

import csv
from typing import Any

import yaml

from fedssl.parts import part_class
from fedssl.tables.files import markdown_table
from fedssl.untrusted import PART_KEYS
from website.repository_files import ROOT

COSTS = "benchmarks/results/method_costs/table.csv"
#: what each aggregator's clients send, in words
SENT = {
    **dict.fromkeys(("weighted_mean", "eua", "l_dawa", "trimmed_mean"), "weights"),
    "representation_mean": "representations of public images",
    "dictionary": "projections of own images",
    "orchestra_clusters": "target networks and cluster centres",
    "base_model": "nothing more (the server sends a base model once)",
}
#: the recipes of the table, each with a page of its name, but for two
RECIPES = (
    *("hetero_ssfl", "fedu2", "lw_fedssl", "prog_fedssl", "fedbyol", "fedsimsiam", "fedsimclr", "fedmoco_v3"),
    *("fedvicreg", "fedlejepa", "fedbarlow", "feddino", "fedu", "fedema", "l_dawa", "feddecorr", "fedx"),
    *("orchestra", "fedca", "per_ssfl", "local_only"),
)
_PAGES = {"prog_fedssl": "lw_fedssl", "local_only": "controls"}


def dotted_name(part: type) -> str:
    """The name by which a page links to a part, such as `fedssl.aggregators.eua.EUA`."""
    return f"{part.__module__}.{part.__qualname__}"


def facts(recipe: str) -> str:
    """Markdown: a recipe's parts with links to their code, its file, and the commands for its cost and its run."""
    text = (ROOT / "fedssl" / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
    rows, counted = [], ""
    for key, part, given in _parts(yaml.safe_load(text)):
        # A value as YAML has it in a list, without the list's brackets.
        plain = {name: yaml.safe_dump([value], default_flow_style=True).strip()[1:-1] for name, value in given.items()}
        options = ", ".join(f"`{name}: {value}`" for name, value in plain.items() if name != "name")
        rows.append([key, f"[`{given['name']}`][{dotted_name(part)}]", options or "-"])
    if cost := _costs().get(recipe):
        counted = (
            f"With these options and the digits' networks, a client's largest step takes {cost['memory_mb']} MB, and "
            f"its mean round takes {cost['gflops_a_round']} GFLOP, sends {cost['up_mb']} MB and receives "
            f"{cost['down_mb']} MB ([counted](../../{COSTS}) by `python -m website.count_method_costs`)."
        )
    return f"""\
{markdown_table(["kind", f"part of `{recipe}`", "options that the recipe sets"], rows, text_columns=3)}

```yaml title="fedssl/recipes/{recipe}.yaml"
{text.rstrip()}
```

```text
fedssl show {recipe}     # every option, what it means, where its value comes from
fedssl cost {recipe}     # a client's memory, operations and traffic, counted before any training
fedssl run {recipe}      # on scikit-learn's digits
```

{counted}"""


def table() -> str:
    """Markdown: the methods with what a choice depends on."""
    head = (
        "method",
        "a client's architecture",
        "what clients send",
        "public images",
        "memory, MB",
        "up, MB",
        "down, MB",
    )
    rows = []
    for recipe in RECIPES:
        values = yaml.safe_load((ROOT / "fedssl" / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
        parts, cost = _parts(values), _costs()[recipe]
        sent = "; ".join(SENT[given["name"]] for key, _, given in parts if key == "aggregators")
        public = any(getattr(part, "needs_public_images", False) for _, part, _ in parts)
        own = values.get("architectures") == "several" or not sent
        link = f"[`{recipe}`](methods/{_PAGES.get(recipe, recipe)}.md)"
        choice = ["its own" if own else "the same for all", sent or "nothing", "needed" if public else "-"]
        rows.append([link, *choice, cost["memory_mb"], cost["up_mb"], cost["down_mb"]])
    return markdown_table(head, rows, text_columns=4)


def _parts(values: dict[str, Any]) -> list[tuple[str, type, dict[str, Any]]]:
    """A recipe's parts: the key, the class, and what the recipe gives."""
    result = []
    for key, (folder, _) in PART_KEYS.items():
        given = values.get(key) or []
        for part in given if isinstance(given, list) else [given]:
            part = {"name": part} if isinstance(part, str) else part
            result.append((key, part_class(folder, part["name"]), part))
    return result


def _costs() -> dict[str, dict[str, str]]:
    """The counted costs by recipe."""
    with (ROOT / COSTS).open(encoding="utf-8") as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}
