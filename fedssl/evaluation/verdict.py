"""Whether a run's encoder has learned, as far as images without labels tell; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..run_folder.record import Run

# How long training takes, from scratch and from weights: in images seen, within bounds of passes.
_FROM_SCRATCH, _FROM_WEIGHTS = (1_200_000, 30, 400), (60_000, 3, 30)
_SHORT = 0.2  # of these passes
_LEAST_GAIN = 3.2  # points; less says little, however many images are compared
# Of the effective rank before; a random network's is high, and encoders that learn digits well come down to two fifths.
_FEW_DIRECTIONS = 0.25


def enough_passes(images: int, from_weights: bool = False) -> int:
    """Return how often training should see each of so many images; more of them gains little."""
    seen, fewest, most = _FROM_WEIGHTS if from_weights else _FROM_SCRATCH
    return max(fewest, min(most, round(seen / max(1, images))))


def too_short(recipe: Mapping[str, Any], images: int) -> str | None:
    """Return a sentence if a recipe sees each of so many training images too rarely to learn much, else None."""
    model = recipe.get("model")
    if not images or (isinstance(model, dict) and model.get("weights")):
        return None
    training, clients = recipe["training"], recipe["partition"]["clients"]
    share = (recipe.get("clients_per_round") or clients) / clients
    passes = training["local_epochs"]
    if training.get("local_steps"):
        passes = training["local_steps"] * training["batch_size"] * clients / images
    passes, enough = passes * share * recipe["rounds"], enough_passes(images)
    if passes >= _SHORT * enough:
        return None
    return (
        f"this run is short: it sees each of {images:,} images {passes:.3g} times, and {enough} times are worth taking "
        "from scratch: expect little of its encoder (more rounds, or --minutes)"
    )


def verdict(run: Run) -> list[str]:
    """Return sentences that say whether a finished run's encoder has learned; none if nothing was measured or trained.

    The figure is `view_retrieval`: of the images' random views, how many are more like another view of the same image
    than like any other image. The encoder must be ahead of what it was before training and of the raw pixels, by more
    than chance: by two standard errors of a difference of two percentages, and 3.2 points at least.
    """
    after = run.evaluated("view_retrieval", "after")
    objective, schedule = (
        part.get("name") if isinstance(part := run.recipe.get(key), dict) else None for key in ("objective", "schedule")
    )
    images = run.evaluated("viewed_images", "after")
    if after is None or not images or not run.finished or schedule == "untrained":
        return []
    found = f"{after:.1f} % of random views find their own image"
    named = (("the encoder before training", "view_retrieval"), ("raw pixels", "pixel_view_retrieval"))
    others = {name: value for name, metric in named if (value := run.evaluated(metric, "before")) is not None}
    margins = {}
    for name, value in others.items():
        variance = (after * (100 - after) + value * (100 - value)) / images
        margins[name] = max(_LEAST_GAIN, 2 * max(0.0, variance) ** 0.5)  # a file may hold any numbers
    compared = ", ".join(f"by {name} {value:.1f} %" for name, value in others.items())
    ahead_of = [name for name, value in others.items() if after > value + margins[name]]
    behind = [name for name in others if name not in ahead_of]
    sentences = [f"{found} ({compared})." if compared else f"{found}."]
    if behind:
        sentences.append(
            f"This encoder has NOT learned: it is not ahead of {' and '.join(behind)} by more than chance "
            f"({max(margins[name] for name in behind):.1f} points with {images:.0f} images). Train it longer "
            "(--minutes), at a lower training.learning_rate, or on more images."
        )
    elif ahead_of:
        sentences.append(f"So it has learned: it is ahead of {' and of '.join(ahead_of)}.")
    linear, of_pixels = run.evaluated("linear", "after"), run.evaluated("pixel_linear", "before")
    if linear is not None and of_pixels is not None:
        if linear <= of_pixels:
            sentences.append(
                f"Its linear accuracy, {linear:.1f} %, is NOT above that of raw pixels, {of_pixels:.1f} %: to tell "
                "these labels apart the pixels serve as well."
            )
        elif behind and (at_first := run.evaluated("linear", "before")) is not None and linear > at_first:
            both = f"the {of_pixels:.1f} % of raw pixels and the {at_first:.1f} % before training"
            sentences.append(f"Yet its linear accuracy is {linear:.1f} %, above {both}.")
    ranks = [run.evaluated("effective_rank", when) for when in ("before", "after")]
    fell = ranks[0] and ranks[1] and ranks[1] < _FEW_DIRECTIONS * ranks[0]
    if fell and "the encoder before training" not in ahead_of:  # images of few kinds need few directions
        other = "" if objective == "simclr" else "objective simclr, "
        sentences.append(
            f"Its representations have collapsed: their effective rank fell from {ranks[0]:.1f} to {ranks[1]:.1f}. "
            f"Take {other}a lower training.learning_rate, or larger batches."
        )
    return sentences
