"""The report's section about differential privacy: what was clipped, which noise was added, and what was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..run_record import Run
from .page import PageTable


def privacy_table(methods: Mapping[str, list[Run]]) -> PageTable | None:
    """A line for each run with differential privacy; None where there is no such run."""
    rows = [
        (name, run.seed, *_noise(privacy), f"{_number(privacy.get('delta')):g}", *_spent(run))
        for name, runs in methods.items()
        for run in runs
        if (privacy := _privacy_options(run))
    ]
    if not rows:
        return None
    header = ("method", "seed", "mechanism", "noise", "clipping norm", "delta", "rounds", "smallest epsilon", "largest")
    return PageTable(header, rows, text_columns=4)


def _privacy_options(run: Run) -> Mapping[str, Any]:
    flower = run.recipe.get("flower")
    privacy = flower.get("differential_privacy") if isinstance(flower, dict) else None
    return privacy if isinstance(privacy, dict) else {}


def _noise(privacy: Mapping[str, Any]) -> tuple[str, str, str]:
    norm = f"{_number(privacy.get('clipping_norm')):g}"
    if privacy.get("name") == "fixed_clipping":
        noise = f"by the server, noise multiplier {_number(privacy.get('noise_multiplier')):g}"
    else:
        noise = f"by each client, for epsilon {_number(privacy.get('epsilon')):g} a round"
        if privacy.get("sensitivity") is not None:
            noise += f" at sensitivity {_number(privacy.get('sensitivity')):g}"
    return str(privacy.get("name")), noise, norm


def _spent(run: Run) -> Sequence[object]:
    """The last committed round, and the epsilons of the clients after it."""
    values = [
        epsilon
        for (number, who, metric), epsilon in run.values.items()
        if metric == "epsilon" and number == run.last_round and who.isdigit()
    ]
    if not values:
        return max(run.last_round, 0), "-", "-"
    return run.last_round, f"{min(values):.4g}", f"{max(values):.4g}"


def _number(value: Any) -> float:
    """An option of a stored recipe, which somebody may have written by hand; NaN where it is no number."""
    return float(value) if isinstance(value, int | float) else float("nan")
