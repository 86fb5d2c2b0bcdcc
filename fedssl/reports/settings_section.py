"""The report's section about settings: what the methods have in common and where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..recipe_text import flatten_keys
from ..run_record import Run
from .page import PageTable

_SHOWN_KEYS = (
    "rounds", "clients_per_round", "client_dropout", "architectures", "data", "partition", "objective", "regularizers",
    "schedule", "aggregators", "local_update", "training",
)  # fmt: skip


def settings_table(methods: Mapping[str, list[Run]]) -> PageTable:
    """The settings of each method's first run; methods that share a value share a line."""
    rows: list[tuple[str, str, str]] = []
    for key in _SHOWN_KEYS:
        names_by_value: dict[str, list[str]] = {}
        for name, runs in methods.items():
            names_by_value.setdefault(_one_line(runs[0].recipe.get(key)), []).append(name)
        if set(names_by_value) == {"-"}:
            continue
        for i, (value, names) in enumerate(names_by_value.items()):
            rows.append(("" if i else key, ", ".join(names) if len(names_by_value) > 1 else "all", value))
    return PageTable(("setting", "of", "value"), rows, text_columns=3)


def folder_table(methods: Mapping[str, list[Run]]) -> PageTable:
    """Every run's folder."""
    rows = [(name, run.seed, run.path) for name, runs in methods.items() for run in runs]
    return PageTable(("method", "seed", "folder"), rows, text_columns=3)


def resolved_recipes(methods: Mapping[str, list[Run]]) -> list[tuple[str, str]]:
    """The method and seed of each method's first run, and its resolved recipe as YAML."""
    return [
        (
            f"{name}, seed {runs[0].seed}",
            yaml.safe_dump(dict(runs[0].recipe), sort_keys=False, allow_unicode=True, width=100),
        )
        for name, runs in methods.items()
    ]


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The dotted keys, but for the seed, in which the runs' recipes differ; sorted."""
    first, *others = (flatten_keys({k: v for k, v in run.recipe.items() if k != "seed"}) for run in runs)
    return sorted({key for other in others for key in first.keys() | other.keys() if first.get(key) != other.get(key)})


def _one_line(value: Any) -> str:
    """A recipe's value as a line of text: a part as `name (key=value, ...)`; options that are None are left out."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return "; ".join(_one_line(item) for item in value) or "-"
    if isinstance(value, dict):
        options = ", ".join(f"{k}={_one_line(v)}" for k, v in value.items() if k != "name" and v is not None)
        if "name" not in value:
            return options
        return f"{value['name']} ({options})" if options else str(value["name"])
    return str(value)
