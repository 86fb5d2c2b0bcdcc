"""RUN/evaluation.csv: the models of a finished run, or of a stopped one, evaluated once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..engines.rounds import models_to_evaluate
from ..errors import UserError
from ..evaluation.evaluate import check_labels, evaluate_model
from ..evaluation.fine_tune import FineTuneOptions, check_fine_tuning
from ..federation import build_federation
from ..randomness import seed_for
from ..reading import load_recipe
from ..run_directory import RunDirectory
from ..storage import csv_text, write_atomically


def evaluate_run(
    path: Path,
    fractions: Sequence[float] = (),
    note: Callable[[str], None] = lambda text: None,
    fine_tune: FineTuneOptions | None = None,
) -> Path:
    """Evaluate the models of a run's last checkpoint, each client's and their mean, or the global one.

    Args:
        path: a run's folder.
        fractions: labelled fractions to fine-tune on, in (0, 1], beside the recipe's own; the papers' are 0.01 and 0.1.
        note: is called with a line of text before each model.
        fine_tune: how to fine-tune on all labels; by default as the recipe says, which may be not at all.

    Returns:
        The file that was written: RUN/evaluation.csv with a line a client and a column a measure.

    Raises:
        UserError: `path` is not a run's folder or has no finished round, a fraction is not in (0, 1], the data are
            missing, or the file cannot be written.
    """
    directory = RunDirectory.open(path)
    if directory.checkpoint.round < 0:
        raise UserError(f"{path} has no finished round yet: continue it with fedssl run --resume {path}")
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise UserError(f"--semi-supervised must be a fraction in (0, 1], for instance 0.01, got {fraction}")
    federation = build_federation(load_recipe(path / "recipe.yaml"))
    recipe, data = federation.recipe, federation.dataset
    if not len(data.measured_images):
        raise UserError(f"the recipe of {path} names no images to evaluate on (data.name=none)")
    fine_tune = fine_tune or recipe.evaluation.fine_tune
    check_fine_tuning(fine_tune, data)
    wanted = list(dict.fromkeys([*recipe.evaluation.semi_supervised, *fractions]))
    check_labels(data, wanted, fine_tune)
    results: dict[str, dict[str, float]] = {}
    server = directory.server_state()
    for who, model in models_to_evaluate(federation, server, directory.client_state):
        note(f"evaluating {'client ' if who.isdigit() else ''}{who}")
        seed = seed_for(recipe.seed, "evaluation")
        results[who], _ = evaluate_model(
            model,
            data,
            recipe.evaluation,
            seed,
            linear=True,
            fractions=wanted,
            fine_tune=fine_tune,
            augmentation=recipe.augmentation,
        )
    names = list(next(iter(results.values())))
    if len(results) > 1:
        results["mean"] = {n: sum(r[n] for r in results.values()) / len(results) for n in names}
    rows = [[who, *(f"{values[name]:.2f}" for name in names)] for who, values in results.items()]
    target = path / "evaluation.csv"
    write_atomically(target, csv_text([["client", *names], *rows]).encode())
    return target
