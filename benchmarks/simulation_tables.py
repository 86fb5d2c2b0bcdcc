"""The tables of ``python -m benchmarks.simulation``."""

import statistics
from typing import Any

from benchmarks import write
from benchmarks.phases import PHASES

LARGEST_OVERHEAD = 0.1
#: how many times as fast as lightly's loop fedssl's local training should be, by objective and architecture
BARS = {("byol", "small_resnet18"): 2.5, ("byol", "small_convnet"): 4.0}
BATCHES_OF_BARS = range(50, 129)
TWO_AT_A_TIME = "two at a time"


def overhead(phases: dict[str, float]) -> float:
    """The share of a round without its evaluation that is not forward, backward or optimiser."""
    network = sum(phases[name] for name in ("forward", "backward", "optimizer"))
    return 1 - network / (sum(phases.values()) - phases["evaluate"])


def tables(results: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    about = results["environment"]
    where = about.get("device") or f"{about['processor']} ({about['instruction_set']})"
    parts = [
        "# Simulations: speed, phases and peers",
        "Written by `python -m benchmarks.simulation`; [benchmarks/README.md](../../../README.md) says how each column "
        "is measured.",
        f"{about['date']}, {where}, {about['threads']} threads, {about['repeats']} repeats, load average "
        f"{about['load_average']} at the start. torch {about['torch']}, Python {about['python']}."
        + (f" Settings changed for fedssl: `{' '.join(results['overrides'])}`." if results["overrides"] else ""),
        "## Rounds",
        _rounds_table(results["simulations"]),
        "Milliseconds of a round by phase:",
        _phases_table(results["simulations"]),
        "## Local training beside peers",
        _training_table(results["trainings"]),
    ]
    return "\n\n".join(parts) + "\n"


def _rounds_table(simulations: list[dict[str, Any]]) -> str:
    lines = []
    for one in simulations:
        if one["status"] != "ok":
            lines.append([one["title"], *6 * ["-"], f"**{one['status']}**"])
            continue
        seconds, phases = statistics.fmean(one["seconds"]), one["phases"]
        share = overhead(phases)
        evaluation = phases["evaluate"]
        without = statistics.fmean(one["timed_seconds"]) - evaluation
        own = (phases["EMA"] + phases["regularizer"]) / (sum(phases.values()) - evaluation)
        lines.append(
            [
                one["title"],
                f"{one['images'] / seconds:,.0f}",
                f"{seconds:.3g}",
                f"{min(one['seconds']):.3g} to {max(one['seconds']):.3g}",
                f"{without:.3g}",
                f"{share:.1%}",
                f"{own:.1%}",
                "met" if share < LARGEST_OVERHEAD else "missed",
            ]
        )
    head = ["run", "images/s", "s a round", "least to most", "timed by phase", "overhead", "of it EMA and regularizer"]
    return write.table([*head, f"bar: overhead < {LARGEST_OVERHEAD:.0%}"], lines)


def _phases_table(simulations: list[dict[str, Any]]) -> str:
    lines = [
        [one["title"], *(_milliseconds(one["phases"][phase]) for phase in PHASES), _milliseconds(_total(one))]
        for one in simulations
        if "phases" in one
    ]
    return write.table(["run", *PHASES, "in all"], lines)


def _training_table(trainings: list[dict[str, Any]]) -> str:
    lines = []
    for one in trainings:
        if one["status"] != "ok":
            lines.append([one["title"], *4 * ["-"], f"**{one['status']}**"])
            continue
        medians = {name: statistics.median(row["times"]) for name, row in one["rows"].items() if row["times"]}
        for name, row in one["rows"].items():
            title = one["title"] if name == "fedssl" else ""
            if name not in medians:
                lines.append([title, name, "-", "-", "-", f"**{row['status']}**"])
                continue
            times, images = row["times"], row["images"]
            whose, _, copies = name.partition(", ")
            ratio = medians[name] / medians[f"fedssl, {copies}" if copies else "fedssl"]  # passes over as many images
            least = BARS.get((one["objective"], one["architecture"]), 0.0)
            judged = least and whose == "lightly" and one["batch_size"] in BATCHES_OF_BARS
            outcome = f"bar: {least:g}, {'met' if ratio >= least else 'missed'}" if judged else ""
            spread = f"{images / max(times):,.0f} to {images / min(times):,.0f}"
            shown = "" if whose == "fedssl" else f"{ratio:.2f}"
            lines.append([title, name, f"{images / medians[name]:,.0f}", spread, shown, outcome])
    return write.table(["training", "loop", "images/s", "least to most", "fedssl is so many times as fast", ""], lines)


def _total(one: dict[str, Any]) -> float:
    return sum(one["phases"].values())


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.1f}"
