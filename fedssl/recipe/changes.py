"""What may change in the recipe of a run that goes on: options on which nothing that is already trained depends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..options import shortened
from ..training import learning_rate
from .overrides import apply_override, flatten_keys
from .reading import parse_recipe
from .recipe import Recipe

#: the options that may change, alone or with all below them
CHANGEABLE = (
    *("rounds", "description", "evaluation", "device", "clients_parallel"),
    *("data.path", "data.more_paths", "data.public_path", "data.labels", "data.download", "data.memory_limit"),
    *("data.follow_links", "model.weights"),
    *("guard.minimum_answers", "flower.round_seconds", "flower.connect_seconds", "training.stop_at_collapse"),
    *("flower.grace", "flower.epsilon_budget", "checkpoints"),
)


class Change(NamedTuple):
    """An option that has another value than before, both as text."""

    option: str
    before: str
    after: str


def changed_recipe(file: Path, stored: Recipe, overrides: Sequence[str], done: int) -> tuple[Recipe, list[Change]]:
    """Return a run's recipe with overrides, and what they change.

    Args:
        file: the run's recipe.yaml.
        stored: the recipe in it.
        overrides: `KEY=VALUE`, as on the command line.
        done: the number of rounds that are finished.

    Raises:
        UserError: an option may not change, a value is not allowed, or there would be fewer rounds than before.
    """
    values = stored.model_dump(mode="json")
    for override in overrides:
        key, equals, _ = override.partition("=")
        if equals and not any(key == option or key.startswith(f"{option}.") for option in CHANGEABLE):
            raise UserError(
                f"{key} cannot change when a run goes on ({rounds_done(done)}): start a new run for it; only "
                f"{', '.join(CHANGEABLE)} can change"
            )
        apply_override(values, override)
    recipe = parse_recipe(values, str(file))
    if recipe.rounds < stored.rounds:
        raise UserError(
            f"rounds={recipe.rounds} is fewer than before: {rounds_done(done)} of {stored.rounds}, and a run that goes "
            f"on can only get more: give more than {stored.rounds}, or leave rounds out"
        )
    changed = differences(stored, recipe)
    if "evaluation.images" in changed:  # figures before and after could not be compared
        raise UserError("evaluation.images cannot change when a run goes on: fedssl evaluate measures on all images")
    return recipe, [Change(key, _text(before), _text(after)) for key, (before, after) in changed.items()]


def differences(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return both values of each option in which two recipes differ, None where a recipe does not have it."""
    old, new = (flatten_keys(recipe.model_dump(mode="json")) for recipe in (before, after))
    return {key: (old.get(key), new.get(key)) for key in new | old if old.get(key) != new.get(key)}


def rounds_done(done: int) -> str:
    """Return `2 rounds are done`."""
    return "1 round is done" if done == 1 else f"{done} rounds are done"


def _text(value: object) -> str:
    return "" if value is None else shortened(value) if isinstance(value, (dict, list)) else str(value)


def consequences(before: Recipe, after: Recipe, done: int) -> list[str]:
    """Return a sentence on each thing that another number of rounds or another device changes besides them."""
    sentences, options, more = [], after.training, before.rounds != after.rounds
    if more and options.learning_rate_schedule != "constant" and after.schedule.trains:
        old, new = (learning_rate(options, done + 1, recipe.rounds) for recipe in (before, after))
        old = old if done < before.rounds else 0.0
        sentences.append(
            f"The cosine learning rate now falls over {after.rounds} rounds: round {done + 1} has {new:.4g} (over "
            f"{before.rounds} rounds it would be {old:.4g} there). A run of {after.rounds} rounds from the start would "
            "have had higher rates before, so this run will not equal it."
        )
    if more and (privacy := after.flower.differential_privacy) is not None:
        sentences.append(
            f"With differential privacy {privacy.name} each further round spends more of the clients' privacy, which "
            "epsilon in metrics.csv counts over all rounds."
        )
    if before.device != after.device:
        sentences.append("Another device rounds differently, so no result is equal bit for bit from here on.")
    return sentences
