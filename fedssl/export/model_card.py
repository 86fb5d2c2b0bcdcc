"""The README.md of an exported encoder: its properties, its training, and its use."""

from pathlib import Path
from typing import Any

from ..data.pixels import is_by_channel
from ..evaluation.metrics import METRICS, is_measure
from ..evaluation.verdict import verdict
from ..run_folder.record import Run, read_run
from ..templates import fill_template
from .trained_encoder import GLOBAL, EncoderOfRun


def model_card(chosen: EncoderOfRun, config: dict[str, Any], path: Path, onnx: bool) -> str:
    """Return the text of README.md, given config.json, the run's folder, and whether encoder.onnx is there."""
    run = read_run(path)
    who = chosen.owner if (run.rounds, chosen.owner, "effective_rank") in run.values else "mean"
    window = chosen.encoder.window
    if isinstance(window, tuple):
        pairs = window if is_by_channel(window) else (window,)
        limits = [f"from {low:g} (0) to {high:g} (255)" for low, high in pairs]
        window_text = limits[0] if len(limits) == 1 else f"by channel {'; '.join(limits)}"
    else:
        window_text = f"`{window}`" if window else ""
    return fill_template(
        "fedssl.export",
        "model_card.md.jinja",
        config=config,
        sentence=" ".join(chosen.recipe.description.split()),
        parameters=sum(parameter.numel() for parameter in chosen.encoder.network.parameters()),
        clients=chosen.recipe.partition.clients,
        own_images=0 if chosen.owner == GLOBAL or not run.class_counts else sum(run.class_counts[int(chosen.owner)]),
        images=sum(map(sum, run.class_counts)),
        verdict=" ".join(verdict(run)),
        figures=_figures(run, who),
        means=who == "mean",
        labelled=(run.rounds, who, "knn") in run.values,
        window=window_text,
        onnx=onnx,
    )


def _figures(run: Run, who: str) -> list[tuple[str, str, str]]:
    """Return the measures of a model before and after training, if there are any."""
    names = dict.fromkeys(name for number, w, name in run.values if number == run.rounds and w == who)
    rows = []
    for name in filter(is_measure, names):
        decimals = METRICS[name].decimals if name in METRICS else 1
        before, after = run.values.get((0, who, name)), run.values[run.rounds, who, name]
        rows.append((name, "" if before is None else f"{before:.{decimals}f}", f"{after:.{decimals}f}"))
    return rows
