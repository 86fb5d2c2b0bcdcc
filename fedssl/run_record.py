"""A run read back from its folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError
from .run_directory import RunDirectory


@dataclass(frozen=True)
class Run:
    """What a run's folder tells, up to its last committed round.

    Attributes:
        path: the folder, as given.
        recipe: the resolved recipe as plain values, so that it shows even where a part of the user's own is gone.
        values: metric value by (round, who, metric); who is a client's number, `global` or `mean`.
        class_names, class_counts: the partition, images per client and class; empty where not stored.
        spectra: singular values by client, descending.
    """

    path: Path
    recipe: Mapping[str, Any]
    values: Mapping[tuple[int, str, str], float]
    class_names: Sequence[str]
    class_counts: Sequence[Sequence[int]]
    spectra: Mapping[str, Sequence[float]]

    @property
    def name(self) -> str:
        return str(self.recipe["name"])

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed", 0))

    @property
    def rounds(self) -> int:
        return int(self.recipe["rounds"])

    @property
    def last_round(self) -> int:
        """The last committed round; -1 where there is none."""
        return max((number for number, _, _ in self.values), default=-1)

    @property
    def finished(self) -> bool:
        return self.last_round >= self.rounds

    def overall(self, metric: str) -> dict[int, float]:
        """By round: the global model's value, or the mean over the clients' models."""
        means = {number: v for (number, who, name), v in self.values.items() if name == metric and who == "mean"}
        return means | {
            number: v for (number, who, name), v in self.values.items() if name == metric and who == "global"
        }

    def evaluated(self, metric: str, when: str, who: str | None = None) -> float | None:
        """A measure `before` training (round 0) or `after` it (the last round, of a finished run only).

        `who` is a client's number; without it, the global model or the mean over clients is meant.
        """
        if when == "after" and not self.finished:
            return None
        number = 0 if when == "before" else self.rounds
        if who is None:
            return self.overall(metric).get(number)
        return self.values.get((number, who, metric))

    def total(self, metric: str) -> float:
        """Sum over all rounds and clients."""
        return sum(v for (_, who, name), v in self.values.items() if name == metric and who.isdigit())


def read_run(path: Path) -> Run:
    """Read a run's folder, finished or not.

    Raises:
        UserError: not a run's folder, or a file in it that cannot be read.
    """
    directory = RunDirectory.open(path)
    try:
        recipe = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8"))
        if not isinstance(recipe, dict) or not {"name", "rounds"} <= recipe.keys():
            raise ValueError("recipe.yaml is not a resolved recipe: it names no name or no rounds")
        values = {
            (int(row["round"]), row["client"], row["metric"]): float(row["value"])
            for row in _csv_rows(path / "metrics.csv", directory.checkpoint.lengths.get("metrics.csv"))
        }
        partition = _csv_rows(path / "partition.csv")
        names = [name for name in partition[0] if name != "client"] if partition else []
        counts = [[int(row[name]) for name in names] for row in partition]
        spectra: dict[str, list[float]] = {}
        for row in _csv_rows(path / "spectrum.csv"):
            spectra.setdefault(row["client"], []).append(float(row["value"]))
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as a run's folder: {' '.join(str(error).split())}") from error
    return Run(path, recipe, values, names, counts, spectra)


def _csv_rows(path: Path, length: int | None = None) -> list[dict[str, str]]:
    """A CSV file's rows, of its first `length` bytes; a last line without its end is not complete and left out."""
    if not path.is_file():
        return []
    data = path.read_bytes()[:length]
    text = data[: data.rfind(b"\n") + 1].decode()
    return list(csv.DictReader(io.StringIO(text)))
