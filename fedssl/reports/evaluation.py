"""evaluation.csv: the models of a run, or an exported encoder, evaluated again or on other data."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..data.datasets import Dataset
from ..data.options import SOURCES, DataOptions
from ..engines.rounds import models_to_evaluate
from ..errors import UserError, explained
from ..evaluation.evaluate import (
    check_downstream,
    check_evaluation,
    evaluate_downstream,
    evaluate_model,
    load_downstream,
)
from ..evaluation.fine_tuning import FineTuneOptions
from ..export.encoder_folder import is_encoder_folder, read_encoder
from ..federation import device_named, federation_of_run, require_same_data
from ..models.model import Model
from ..options import validated
from ..randomness import seed_for
from ..recipe.overrides import read_text
from ..run_folder.directory import RunDirectory
from ..run_folder.storage import csv_text, read_csv, require_file_name, write_atomically


def evaluate(
    path: str | Path,
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
        trust: run the code of your own parts that the run's recipe names.

    Returns:
        By client (`"0"`, `"1"`, ...; also `"mean"` if there are several models; `"global"` for one model of all
        clients, `"encoder"` for an exported one) each measure by its name, as in the file: accuracies in percent,
        rounded to two decimals.

    Raises:
        UserError: the folder holds no run or encoder, no round is finished yet, a value is out of range, the data
            are missing or do not fit, the recipe names code that is not trusted, or the file cannot be written.
    """
    options = validated(FineTuneOptions, {"images": fine_tune}, "fine_tune") if fine_tune else None
    other = None if data is None else validated(DataOptions, data, "data")
    written = write_evaluation(Path(path), semi_supervised, fine_tune=options, data=other, trust=trust)
    given = None if other is None else _source(other)
    rows = [row for row in read_csv(written) if row.pop("data", given) == given]
    return {row.pop("client"): {name: float(value) for name, value in row.items() if value} for row in rows}


def write_evaluation(
    path: Path,
    fractions: Sequence[float] = (),
    note: Callable[[str], None] = lambda text: None,
    fine_tune: FineTuneOptions | None = None,
    data: DataOptions | None = None,
    trust: bool = False,
) -> Path:
    """Evaluate as `evaluate` does, which has the same errors, and return the written file.

    That is FOLDER/evaluation.csv, or FOLDER/evaluation-DATA.csv for other data, with a line per client and a column per
    measure. Of other data a column `data` says which they are, and lines of others of the same name stay.

    Args:
        fractions: `semi_supervised` of `evaluate`; they come on top of the recipe's, and the papers' are 0.01 and 0.1.
        note: called with a line of text before each model.
        fine_tune: how to fine-tune on all labels (default: as in the recipe, if it does).
    """
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise UserError(f"--semi-supervised must be a fraction in (0, 1], for instance 0.01, got {fraction}")
    exported = is_encoder_folder(path)
    models: Iterable[tuple[str, Model]]
    shape: Sequence[int]
    downstream: Mapping[str, Dataset] = {}
    if exported:
        if data is None:
            example = "--data name=npz,path=mine.npz"
            raise UserError(f"{path} is an exported encoder, which names no data: give --data, such as {example}")
        encoder = read_encoder(path)
        options, seed, augmentation = encoder.evaluation, encoder.seed, encoder.views
        shape = encoder.image_shape
        data = data.model_copy(update={"window": data.window or encoder.window})
        models = [("encoder", Model({"encoder": encoder.network}).to(device_named("auto")))]
    else:
        directory = RunDirectory.open(path)
        if directory.checkpoint.round < 0:
            raise UserError(f"{path} has no finished round yet: continue it with {directory.continued_by}")
        federation = federation_of_run(directory, trust, downstream=data is None)
        if data is None:
            require_same_data(path, federation.data_digests())
        recipe, dataset = federation.recipe, federation.dataset
        options, seed, augmentation = recipe.evaluation, recipe.seed, recipe.augmentation
        shape, downstream = dataset.train_images.shape[1:], federation.downstream
        models = models_to_evaluate(federation, directory)
    label = "" if data is None else f"-{Path(_source(data)).stem}"
    target = path / f"evaluation{re.sub(r'[^A-Za-z0-9_.-]+', '-', label)}.csv"
    require_file_name(target)
    others: list[dict[str, str]] = []
    if data is not None:
        with explained(f"{target} cannot be read", "; move it away, as it is to have one more data set's figures"):
            others = [row for row in read_csv(target) if row.get("data", _source(data)) != _source(data)]
    requested = list(dict.fromkeys([*options.semi_supervised, *fractions]))
    changes = {"semi_supervised": requested, "fine_tune": fine_tune or options.fine_tune, "images": None}
    options = options.model_copy(update=changes)
    if data is not None:
        dataset = load_downstream(data, shape, seed)
    elif not len(dataset.measured_images) and not downstream:
        raise UserError(f"the recipe of {path} names no images to evaluate on (data.name=none): give --data")
    check_evaluation(dataset, options)
    seed = seed_for(seed, "evaluation")
    more: dict[str, Any] = {"augmentation": augmentation, "own_classes": data is None or exported}
    results: dict[str, dict[str, float]] = {}
    for who, model in models:
        note(f"evaluating {'client ' if who.isdigit() else ''}{who}")
        if data is not None:
            check_downstream(model, dataset, options)
        measures: dict[str, float] = {}
        if len(dataset.measured_images):
            measures, _ = evaluate_model(model, dataset, options, seed, linear=True, fine_tune=True, **more)
        results[who] = measures | evaluate_downstream(model, downstream, options, seed, augmentation, True)
    names = list(next(iter(results.values())))
    if len(results) > 1:
        results["mean"] = {n: sum(r[n] for r in results.values()) / len(results) for n in names}
    of_data = {} if data is None else {"data": _source(data)}
    rows = [{"client": who, **of_data, **{n: f"{values[n]:.2f}" for n in names}} for who, values in results.items()]
    columns = list(dict.fromkeys(name for row in [*rows, *others] for name in row))
    table = [columns, *([row.get(name, "") for name in columns] for row in [*others, *rows])]
    write_atomically(target, csv_text(table).encode())
    return target


def _source(data: DataOptions) -> str:
    return str(data.path) if data.path and SOURCES[data.name].path else data.name


def parse_data(text: str) -> DataOptions:
    """Return the data that a text such as `name=npz,path=mine.npz` names; the keys are those of a recipe's `data`."""
    values: dict[str, Any] = {}
    for pair in re.split(r",(?=\w+=)", text):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--data: expected KEY=VALUE pairs such as name=npz,path=mine.npz, got {text!r}")
        if key in values:
            raise UserError(f"--data: {key} is given twice in {text!r}; remove one of them")
        values[key] = read_text(DataOptions, [key], value, f"--data: the value of {pair!r}")
    return validated(DataOptions, values, "data")
