"""Read a run back from its folder, for reports, tables and notebooks.

from fedssl.run_folder.record import read_run

run = read_run("runs/fedu-seed0")
run.evaluated("knn", "after")        # kNN accuracy in percent after the last round
run.overall("loss")                  # {1: 3.1, 2: 2.7, ...}
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import explained
from ..untrusted import MOST_BYTES, NAME_PATTERN, parse_yaml, read_regular_file
from .directory import HISTORY, RunDirectory
from .storage import read_csv, read_rows


@dataclass(frozen=True)
class Run:
    """The content of a run's folder, up to the last committed round.

    Attributes:
        recipe: the resolved recipe as plain values, which need no file of a custom part.
        values: metric values by (round, who, metric). Round 0 is before training. `who` is a client's number as text
            (`"0"`), `global` for the global model, or `mean` for the mean over the clients.
        class_names: the classes' names; empty if the folder holds no partition.
        class_counts: training images per client and class, [clients, classes]; empty without a partition.
        history: the options that were changed when the run went on, one mapping each: `option`, `before`, `after`, the
            `round` that was the last one then, `when`, and the `version` of fedssl; see `fedssl.resume`.
        refused: round, client and reason of each answer that was left out, is missing, or did not count in full.
        seconds: what all rounds have taken, evaluations included.
        out_of_patience: whether evaluation.patience has ended the run before its last round.
    """

    path: Path
    recipe: Mapping[str, Any]
    values: Mapping[tuple[int, str, str], float]
    class_names: Sequence[str]
    class_counts: Sequence[Sequence[int]]
    history: Sequence[Mapping[str, str]] = ()
    refused: Sequence[tuple[int, int, str]] = ()
    seconds: float = 0.0
    out_of_patience: bool = False

    @property
    def name(self) -> str:
        """Return the recipe's name, which runs that differ only in their seed share."""
        return str(self.recipe["name"])

    @property
    def seed(self) -> int:
        """Return the seed of the run's random numbers."""
        return int(self.recipe.get("seed", 0))

    @property
    def rounds(self) -> int:
        """Return the recipe's number of rounds."""
        return int(self.recipe["rounds"])

    @cached_property
    def last_round(self) -> int:
        """Return the last committed round; -1 if there is none."""
        return max((number for number, _, _ in self.values), default=-1)

    @property
    def finished(self) -> bool:
        """Return whether the last round of the recipe is committed."""
        return self.last_round >= self.rounds

    def architecture_of(self, client: int) -> str:
        """Return the name of a client's encoder: the recipe's architectures repeat over the clients."""
        names = self.recipe.get("architectures") or [""]
        return str(names[client % len(names)])

    def overall(self, metric: str) -> dict[int, float]:
        """Return a metric's values by round: the global model's if there is one, otherwise the mean over the clients.

        Empty if the run has no such metric. Metrics are for instance `knn`, `linear`, `effective_rank`, `loss`.
        """
        means, global_values = (
            {number: value for (number, who, name), value in self.values.items() if (who, name) == (owner, metric)}
            for owner in ("mean", "global")
        )
        return means | global_values

    def evaluated(self, metric: str, when: Literal["before", "after"], who: str | None = None) -> float | None:
        """Return a metric's value before training (round 0), or after the last round of a finished run.

        It is client `who`'s, a number as text; by default the global model's or the mean over the clients, see
        `overall`. None if it was not measured, or for `after` if the run is not finished.
        """
        if when not in ("before", "after"):
            raise ValueError(f"when must be 'before' or 'after', got {when!r}")
        if when == "after" and not self.finished:
            return None
        number = 0 if when == "before" else self.rounds
        return self.overall(metric).get(number) if who is None else self.values.get((number, who, metric))

    def total(self, metric: str) -> float:
        """Return the sum of a metric, such as `bytes_down` or `flops`, over all rounds and clients."""
        return sum(value for (_, who, name), value in self.values.items() if name == metric and who.isdigit())


def read_run(path: str | Path) -> Run:
    """Read a run's folder, finished or not.

    Args:
        path: a folder that `fedssl run` has written.

    Raises:
        UserError: the folder holds no run, or a file in it cannot be read.
    """
    path = Path(path)
    directory = RunDirectory.open(path)
    with explained(f"{path} cannot be read as a run's folder"):
        recipe = parse_yaml(read_regular_file(path / "recipe.yaml", MOST_BYTES).decode(), str(path / "recipe.yaml"))
        _check_recipe(recipe)
        values = {(number, who, metric): value for number, who, metric, value in directory.read_metrics()}
        header, *partition = read_rows(path / "partition.csv") or [[]]
        class_names = header[1:] if partition else []
        class_counts = [[int(_from_zero(count, "partition.csv")) for count in row[1:]] for row in partition]
        seconds = sum(_from_zero(row["seconds"], "timings.csv") for row in read_csv(path / "timings.csv"))
        history = read_csv(path / HISTORY)
        refused = directory.read_refused()
        best, evaluation = directory.checkpoint.best, recipe.get("evaluation")
        patience = evaluation.get("patience") if isinstance(evaluation, dict) else None
        later = {number for number, _, metric in values if best and number > best.round and metric == "view_retrieval"}
        ended = isinstance(patience, int) and len(later) >= patience
    return Run(path, recipe, values, class_names, class_counts, history, refused, seconds, ended)


def read_spectra(path: Path) -> list[list[float]]:
    """Return the singular values, descending, of each model's representations at the end of a run, see spectrum.csv.

    Empty if the run has none. A UserError is raised if the file cannot be read.
    """
    spectra: dict[str, list[float]] = {}
    with explained(f"{path / 'spectrum.csv'} cannot be read"):
        for row in read_csv(path / "spectrum.csv"):
            spectra.setdefault(row["client"], []).append(_from_zero(row["value"], "spectrum.csv", math.inf))
    return list(spectra.values())


def _check_recipe(recipe: Any) -> None:
    """Raise ValueError if this is not a resolved recipe. The parts are not checked, because their files may be gone."""
    if not isinstance(recipe, dict) or not {"name", "rounds"} <= recipe.keys():
        raise ValueError("recipe.yaml is not a resolved recipe: `name` or `rounds` is missing")
    if not isinstance(recipe["name"], str) or not re.match(NAME_PATTERN, recipe["name"]):
        raise ValueError("recipe.yaml: `name` must be 1 to 200 characters on one line, without control characters")
    for key, least in (("rounds", 1), ("seed", 0)):
        value = recipe.get(key, least)
        if type(value) is not int or value < least:
            raise ValueError(f"recipe.yaml: `{key}` must be a whole number from {least}, got {str(value)[:40]!r}")
    if not isinstance(recipe.get("architectures") or [], list):
        raise ValueError("recipe.yaml: `architectures` must be a list")


def _from_zero(text: str, file: str, limit: float = 2**40) -> float:
    value = float(text)
    if not 0 <= value < limit:
        raise ValueError(f"{file}: {text[:40]!r} is no number from 0")
    return value
