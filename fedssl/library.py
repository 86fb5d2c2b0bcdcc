"""The functions of `fedssl` for scripts and notebooks. Each accepts a path as a `str` or a `Path`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .engines import engine_of
from .engines.observers import Observer, Observers
from .evaluation.fine_tuning import FineTuneOptions
from .export.encoder_folder import is_encoder_folder
from .recipe import reading
from .recipe.recipe import Recipe
from .reports import evaluation, report
from .run import record
from .run.directory import RunDirectory
from .run.record import Run

AnyPath = str | Path


def load_recipe(name_or_path: AnyPath, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe and check every key.

    Args:
        name_or_path: name of a shipped recipe (`recipe_names()` lists them), or path of a YAML file.
        overrides: settings to change, such as `["rounds=2", "training.batch_size=64"]`; each value is YAML.

    Raises:
        UserError: there is no such recipe, or a key or value is invalid. The message says what is allowed.
        TypeError: `overrides` is a single string.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides: expected a list such as [{overrides!r}], got the string {overrides!r}")
    return reading.load_recipe(name_or_path, overrides)


def run(recipe: Recipe, path: AnyPath, *, overwrite: bool = False, observers: Iterable[Observer] = ()) -> Run:
    """Run a recipe to its end and read the run back.

    The run is committed to its folder after every round; `resume` continues it if it is interrupted.

    Args:
        recipe: from `load_recipe`.
        path: the run's folder, which must not exist unless `overwrite` is true.
        overwrite: replace an existing folder.
        observers: objects that are called when the run begins, after each round, and in the end; see `Observer`.

    Raises:
        UserError: the folder exists, the data cannot be read, or the recipe's parts do not go together.
    """
    return read_run(engine_of(recipe).run(recipe, Path(path), Observers(observers), overwrite).path)


def resume(
    path: AnyPath,
    *,
    trust: bool = False,
    clients_parallel: int | None = None,
    observers: Iterable[Observer] = (),
) -> Run:
    """Continue an interrupted run to its end and read it back; a finished run is only read.

    The result is the same, bit for bit, as if the run had not been interrupted.

    Args:
        path: the run's folder.
        trust: run the code of parts of your own that the recipe names even if it is not what it was when the run began.
        clients_parallel: how many clients train at a time from here on; by default as the recipe has it.
        observers: as in `run`; they are told from which round on the run continues.

    Raises:
        UserError: the folder holds no run, or a file that the run relies on was changed.
    """
    directory = RunDirectory.open(Path(path))
    recipe = reading.load_stored_recipe(directory, trust, resuming=True)
    engine = engine_of(recipe)
    return read_run(engine.resume(directory.path, Observers(observers), trust, clients_parallel).path)


def read_run(path: AnyPath) -> Run:
    """Read a run's folder, finished or not: its recipe, metrics and partition.

    Args:
        path: the run's folder.

    Raises:
        UserError: the folder holds no run, or a file in it cannot be read.
    """
    return record.read_run(Path(path))


def evaluate(
    path: AnyPath,
    *,
    semi_supervised: Sequence[float] = (),
    fine_tune: Literal["train", "validation"] | None = None,
    data: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> dict[str, dict[str, float]]:
    """Evaluate the models of a run's last round or an exported encoder, and write evaluation.csv into its folder.

    Args:
        path: the run's folder, or a folder that `fedssl export` has written.
        semi_supervised: labelled fractions to fine-tune on, each above 0 and up to 1.
        fine_tune: also fine-tune on all labels of these images.
        data: other data than the run's, such as `{"name": "npz", "path": "mine.npz"}`; an exported encoder needs them.
        trust: run the code of parts of your own that the run's recipe names.

    Returns:
        By client (`"0"`, `"1"`, ...; also `"mean"` if there are several models; `"global"` for one model of all
        clients, `"encoder"` for an exported one) each measure by its name, as in the file: accuracies in percent,
        rounded to two decimals.

    Raises:
        UserError: the folder holds no run or encoder, no round is finished yet, a fraction is out of range, or the data
            cannot be read.
    """
    options = FineTuneOptions(images=fine_tune) if fine_tune else None
    other = None if data is None else evaluation.data_options(data)
    folder = Path(path)
    if is_encoder_folder(folder):
        written = evaluation.evaluate_export(folder, other, semi_supervised, options)
    else:
        written = evaluation.evaluate_run(folder, semi_supervised, fine_tune=options, data=other, trust=trust)
    with open(written, newline="", encoding="utf-8") as file:
        return {row.pop("client"): {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)}


def write_report(
    runs: AnyPath | Sequence[AnyPath],
    output: AnyPath | None = None,
    *,
    collapse: bool = True,
    images: bool = True,
    trust: bool = False,
) -> Path:
    """Write an HTML page with the curves, tables, partition and representations of one or more runs.

    Args:
        runs: the folder of a run, or several.
        output: the file to write; RUN/report.html by default, or report.html for several runs.
        collapse: also check whether representations have collapsed; this loads the run's images.
        images: also show images of the data as the encoder sees them; the page then holds these images.
        trust: run the code of parts of your own that a run's recipe names; only the two options above need it.

    Returns:
        The file that was written.

    Raises:
        UserError: a folder holds no run, or the file cannot be written.
    """
    paths = [runs] if isinstance(runs, (str, Path)) else runs
    target = None if output is None else Path(output)
    return report.write_report([Path(path) for path in paths], target, collapse, trust, images)
