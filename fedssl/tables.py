"""Tables: a grid of recipes and seeds, run cell by cell, with a verdict that follows a fixed rule.

OUTPUT/table.yaml                    the table that was run
OUTPUT/<row's label>/seed-<n>/       one run's folder a cell
OUTPUT/table.md, table.csv, table.html, picture.png
"""

from __future__ import annotations

import copy
import csv
import difflib
import io
import multiprocessing
import os
import re
import signal
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from .data.datasets import load_dataset
from .data.partitions import partition_indices
from .engines import in_process
from .errors import UserError
from .options import Options
from .plots import Card, draw_table_picture, format_values, mean_and_spread, metric_title
from .recipe import PART_KEYS, Recipe, _explain, apply_override, parse_recipe, read_values
from .report import Run, escape, flatten, html_figure, html_table, page, read_run
from .run_directory import RunDirectory
from .storage import cannot_write, write_atomically

Metric = Literal["knn", "linear", "effective_rank", "loss", "cka"]
#: the metrics that a gain is claimed in
JUDGED = ("knn", "linear")
UNTRAINED = "untrained"
_NOTE_SECONDS = 30.0
Note = Callable[[str], None]


class TableRow(Options):
    """A recipe (shipped name or path, from where the command is called) with changed settings, under a label."""

    label: str = Field(..., min_length=1)
    recipe: str
    settings: dict[str, Any] = Field(default_factory=dict)


class Table(Options):
    """What to run and how to judge it.

    name, description: what the table is called, and what it compares.
    seeds: each row is run once with each.
    metrics: the columns.
    method: the row that the verdict is about; no verdict where not given.
    baselines, controls: the rows that it must beat. Other rows are shown and do not enter the verdict.
    settings: recipe values for all rows.
    rows: the rows.
    paper: figures to show beside ours, by label and metric, as printed there.
    """

    name: str = Field(..., pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    description: str = ""
    seeds: list[int] = Field(..., min_length=1)
    metrics: list[Metric] = Field(["knn", "linear", "effective_rank"], min_length=1)
    method: str | None = None
    baselines: list[str] = Field(default_factory=list)
    controls: list[str] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: list[TableRow] = Field(..., min_length=1)
    paper: dict[str, dict[Metric, str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Table:
        labels = [row.label for row in self.rows]
        slugs = [_slug(label) for label in labels]
        for i, slug in enumerate(slugs):
            if slug in slugs[:i]:
                raise ValueError(f"rows {labels[slugs.index(slug)]!r} and {labels[i]!r} need labels that differ more")
        if UNTRAINED in slugs:
            raise ValueError(f"{UNTRAINED!r} is the label of the row before training; choose another")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different numbers from 0 on, got {self.seeds}")
        named = {
            "method": [self.method] if self.method is not None else [],
            "baselines": self.baselines,
            "controls": self.controls,
            "paper": list(self.paper),
        }
        for key, values in named.items():
            for value in values:
                if value not in labels:
                    raise ValueError(f"{key} names {value!r}, which is no row's label; labels are {', '.join(labels)}")
        judged = [*named["method"], *self.baselines, *self.controls]
        for label in judged:
            if judged.count(label) > 1:
                raise ValueError(f"{label!r} may stand only once in method, baselines and controls together")
        return self

    def role(self, label: str) -> str:
        """`method`, `baseline`, `control` or `other`."""
        if label == self.method:
            return "method"
        return "baseline" if label in self.baselines else "control" if label in self.controls else "other"


@dataclass(frozen=True)
class Results:
    """Values by label, metric and seed, of the finished cells: of the untrained encoders and after the last round."""

    before: dict[str, dict[str, dict[int, float]]]
    after: dict[str, dict[str, dict[int, float]]]

    def values(self, label: str, metric: str, when: Literal["before", "after"] = "after") -> list[float]:
        """One value a finished seed."""
        found = self.after if when == "after" else self.before
        return list(found.get(label, {}).get(metric, {}).values())


# Reading tables


def table_names() -> list[str]:
    """The tables that ship with fedssl."""
    folder = resources.files("fedssl") / "tables"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_table(name_or_path: str | Path) -> Table:
    """Read a shipped table by name, or a file by path.

    Raises:
        UserError: no such table; not YAML; a key or value that is not allowed, with its path and what is.
    """
    text = str(name_or_path)
    if text in table_names():
        content = (resources.files("fedssl") / "tables" / f"{text}.yaml").read_text(encoding="utf-8")
    else:
        path = Path(text).expanduser()
        if not path.is_file():
            near = difflib.get_close_matches(text, table_names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"no table {text!r}: {hint}shipped are {', '.join(table_names())}, or give a .yaml file")
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise UserError(f"{text} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{text} must hold a mapping of table keys, it holds {type(values).__name__}")
    return _parse_table(values, text)


def _parse_table(values: dict[str, Any], source: str) -> Table:
    problems: list[str] = []
    rows = values.get("rows")
    if isinstance(rows, list):  # one by one, so that a wrong key is told with those allowed
        for i, row in enumerate(rows):
            try:
                TableRow.model_validate(row)
            except ValidationError as error:
                problems += _explain(error, TableRow, f"rows.{i}")
    if not problems:
        try:
            return Table.model_validate(values)
        except ValidationError as error:
            problems = _explain(error, Table)
    raise UserError(f"{source}: {'; '.join(problems)}")


def cell_recipe(table: Table, row: TableRow, seed: int, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of one cell: the row's recipe, then the table's settings, the row's, and `key=value` overrides.

    Mappings are merged key by key; lists are replaced; a part with another name replaces the part.

    Raises:
        UserError: see `load_recipe`; the message names the row.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in ("seed", "name"):
            raise UserError(f"{override!r}: a table sets {key} itself; change the table's {key}s instead")
    try:
        values = read_values(row.recipe)
        for settings in (table.settings, row.settings):
            values = _merge(values, settings)
        for override in overrides:
            apply_override(values, override)
        return parse_recipe(values | {"name": row.label, "seed": seed}, source=row.recipe)
    except UserError as error:
        raise UserError(f"row {row.label!r}: {error}") from error


def _merge(values: dict[str, Any], changes: dict[str, Any], top: bool = True) -> dict[str, Any]:
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(change, dict):
            another_part = top and key in PART_KEYS and change.get("name", old.get("name")) != old.get("name")
            merged[key] = copy.deepcopy(change) if another_part else _merge(old, change, top=False)
        else:
            merged[key] = copy.deepcopy(change)  # overrides change what is merged in place
    return merged


# Running tables


@dataclass(frozen=True)
class _Cell:
    label: str
    seed: int
    recipe: Recipe
    path: Path

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.path / "recipe.yaml").is_file() and RunDirectory.open(self.path).checkpoint.finished


def run_table(
    table: Table,
    output: Path,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    jobs: int = 1,
    note: Note | None = None,
) -> Path:
    """Run what is not yet finished of a table, then write its results into `output`.

    Nothing is run before all recipes are checked. Stopped at any moment (Ctrl-C raises KeyboardInterrupt, after the
    worker processes have ended), the same call continues. A cell that fails with a UserError does not stop the others.

    Args:
        table: see `load_table`.
        output: the folder; new, empty, or the same table's.
        overrides: `key=value`, for all rows.
        seeds: instead of the table's.
        jobs: cells at a time, each in a process of its own with its share of the processor cores as threads.
        note: is told lines of progress, and in the end the table and its verdict.

    Returns:
        `output`.

    Raises:
        UserError: a recipe that is refused; a cell in `output` that another recipe has made; cells that failed.
    """
    say = note or (lambda text: None)
    if jobs < 1:
        raise UserError(f"jobs must be at least 1, got {jobs}")
    if seeds is not None:
        table = _parse_table(table.model_dump() | {"seeds": list(seeds)}, table.name)
    cells = [
        _Cell(row.label, seed, cell_recipe(table, row, seed, overrides), _cell_path(output, row.label, seed))
        for row in table.rows
        for seed in table.seeds
    ]
    _check_output(output, cells)
    header = "".join(f"# with {' '.join(override.split())}\n" for override in overrides)
    content = yaml.safe_dump(table.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(output, error) from error
    write_atomically(output / "table.yaml", (header + content).encode())

    waiting = [cell for cell in cells if not cell.finished]
    say(f"{table.name}: {len(cells)} runs, {len(cells) - len(waiting)} of them finished already; in {output}")
    told = _Telling(say, len(cells), len(waiting))
    failures = _run_here(waiting, told) if jobs == 1 else _run_in_processes(waiting, min(jobs, len(waiting)), told)
    results = read_results(table, output)
    if any(cell.finished for cell in cells):
        _write_results(table, results, output, cells)
        say("\n" + format_table(table, results) + "\n")
        say(verdict(table, results))
        say(f"\npicture: {output / 'picture.png'}\npage:    {output / 'table.html'}")
    if failures:
        listed = "; ".join(f"{cell}: {message}" for cell, message in failures)
        raise UserError(f"{len(failures)} of {len(cells)} runs failed: {listed}")
    return output


def _check_output(output: Path, cells: Sequence[_Cell]) -> None:
    """Refuse a folder with other things in it, or with cells that other recipes have made."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; name a folder as the table's output")
    if output.is_dir() and any(output.iterdir()) and not (output / "table.yaml").is_file():
        raise UserError(f"{output} is not empty and holds no table.yaml: name a new folder as the table's output")
    for cell in cells:
        path = cell.path / "recipe.yaml"
        if not path.is_file():
            continue
        try:
            stored = flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
        wanted = flatten(yaml.safe_load(cell.recipe.to_yaml()))
        for key in dict.fromkeys([*wanted, *stored]):
            if key != "description" and wanted.get(key) != stored.get(key):
                raise UserError(
                    f"{cell.path} was made with {key}={stored.get(key)}, now it is {wanted.get(key)}: "
                    "name another output, or remove that folder"
                )


class _Telling:
    """Progress in lines: one when a cell ends, and one now and then while none does."""

    def __init__(self, say: Note, cells: int, waiting: int):
        self.say, self.cells, self.waiting = say, cells, waiting
        self.ended = 0
        self.started = self.last = time.monotonic()

    def round(self, cell: _Cell, number: int) -> None:
        if time.monotonic() - self.last >= _NOTE_SECONDS:
            self._tell(f"{cell}: round {number} of {cell.recipe.rounds}")

    def end(self, cell: _Cell, failure: str | None = None) -> None:
        self.ended += 1
        left = (self.waiting - self.ended) * (time.monotonic() - self.started) / self.ended
        time_left = f"; {_duration(left)} left" if self.ended < self.waiting else ""
        if failure is None:
            run = read_run(cell.path)
            found = ((metric, run.evaluated(metric, "after")) for metric in JUDGED)
            state = ", ".join(f"{metric} {value:.1f}" for metric, value in found if value is not None)
        else:
            state = f"failed: {failure}"
        self._tell(f"{self.cells - self.waiting + self.ended}/{self.cells}  {cell}: {state}{time_left}")

    def _tell(self, text: str) -> None:
        self.last = time.monotonic()
        self.say(text)


class _Rounds(in_process.Silent):
    """Hands the engine's rounds on."""

    def __init__(self, tell: Callable[[int], None]):
        self.tell = tell

    def round_done(self, round_number: int, metrics: dict[str, float]) -> None:
        self.tell(round_number)


def _run_cell(recipe: Recipe, path: Path, tell: Callable[[int], None]) -> None:
    if (path / "recipe.yaml").is_file():
        in_process.resume(path, _Rounds(tell))
    else:
        in_process.run(recipe, path, _Rounds(tell))


def _run_here(cells: Sequence[_Cell], told: _Telling) -> list[tuple[_Cell, str]]:
    failures = []
    for cell in cells:
        try:
            _run_cell(cell.recipe, cell.path, lambda number, cell=cell: told.round(cell, number))  # type: ignore[misc]
        except UserError as error:
            failures.append((cell, str(error)))
            told.end(cell, str(error))
        else:
            told.end(cell)
    return failures


def _run_in_processes(cells: Sequence[_Cell], jobs: int, told: _Telling) -> list[tuple[_Cell, str]]:
    """Each worker process takes one cell after another; all have ended when this returns or raises."""
    context = multiprocessing.get_context("spawn")  # a forked child may hang in torch's thread pool
    threads = max(1, (os.cpu_count() or 1) // max(jobs, 1))
    queue = list(reversed(cells))
    failures: list[tuple[_Cell, str]] = []
    busy: dict[Connection, _Cell] = {}
    workers: dict[Connection, Any] = {}

    def start_worker() -> None:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_work, args=(theirs, threads), daemon=True)
        with _interrupts_ignored():  # children inherit it: Ctrl-C is this process's to handle
            worker.start()
        theirs.close()
        workers[ours] = worker
        give(ours)

    def give(connection: Connection) -> None:
        if queue:
            cell = queue.pop()
            busy[connection] = cell
            # as text: a part from the user's own file cannot be pickled
            connection.send((cell.recipe.to_yaml(), cell.path))
        else:
            connection.send(None)

    try:
        for _ in range(jobs):
            start_worker()
        while busy:
            for connection in cast(list[Connection], wait(list(busy))):
                cell = busy[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    del busy[connection]
                    worker = workers.pop(connection)
                    worker.join()
                    message = f"its process ended with code {worker.exitcode}; out of memory? try a smaller --jobs"
                    failures.append((cell, message))
                    told.end(cell, message)
                    if queue:
                        start_worker()
                    continue
                if kind == "round":
                    told.round(cell, content)
                    continue
                if kind == "bug":
                    raise RuntimeError(f"{cell}: {content}")
                if kind == "failed":
                    failures.append((cell, content))
                del busy[connection]
                told.end(cell, content)
                give(connection)
    finally:
        for worker in workers.values():
            worker.terminate()  # idle, or stopped between two commits of its round: either way nothing is lost
        for worker in workers.values():
            worker.join()
    order = {id(cell): i for i, cell in enumerate(cells)}
    return sorted(failures, key=lambda failure: order[id(failure[0])])


def _work(connection: Connection, threads: int) -> None:
    """A worker process: receives cells until None, answers with (kind, content)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # fewer where OMP_NUM_THREADS says so
    while (task := connection.recv()) is not None:
        text, path = task
        try:
            recipe = parse_recipe(yaml.safe_load(text))
            _run_cell(recipe, path, lambda number: connection.send(("round", number)))
        except UserError as error:
            connection.send(("failed", str(error)))
        except Exception:
            connection.send(("bug", traceback.format_exc()))
        else:
            connection.send(("done", None))


def _end_with_parent() -> None:
    """No worker outlives a killed parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "row"


def _cell_path(output: Path, label: str, seed: int) -> Path:
    return output / _slug(label) / f"seed-{seed}"


# Results


def read_results(table: Table, output: Path) -> Results:
    """What the finished cells of a table's folder reached; the others are left out."""
    before: dict[str, dict[str, dict[int, float]]] = {}
    after: dict[str, dict[str, dict[int, float]]] = {}
    for row in table.rows:
        for seed in table.seeds:
            path = _cell_path(output, row.label, seed)
            if not (path / "recipe.yaml").is_file():
                continue
            run = read_run(path)
            if not run.finished:
                continue
            for metric in table.metrics:
                _keep(before, row.label, metric, seed, run.overall(metric).get(0))
                _keep(after, row.label, metric, seed, run.overall(metric).get(run.rounds))
    return Results(before, after)


def _keep(
    found: dict[str, dict[str, dict[int, float]]], label: str, metric: str, seed: int, value: float | None
) -> None:
    if value is not None:
        found.setdefault(label, {}).setdefault(metric, {})[seed] = value


def _reference(table: Table) -> str:
    """The row whose runs tell what untrained encoders reach."""
    return table.method or table.rows[0].label


def verdict(table: Table, results: Results) -> str:
    """What the figures say, a line a metric, by a rule that is fixed beforehand.

    A collaboration gain is said where the method's mean exceeds the mean of every baseline and of every control by
    more than the sum of the two sample standard deviations, of kNN and linear accuracy each for itself. Otherwise
    those that it does not beat are named, with the differences. It takes two seeds, a baseline and a control.
    """
    if table.method is None:
        return ""
    lines = [_judge(table, results, metric) for metric in JUDGED if metric in table.metrics]
    return "\n".join(lines)


def _judge(table: Table, results: Results, metric: str) -> str:
    method = table.method
    assert method is not None
    name = {"knn": "kNN accuracy", "linear": "Linear accuracy"}[metric]
    rivals = [*table.baselines, *table.controls]
    undecided = f"{name}: nothing can be said about a collaboration gain:"
    if not table.baselines or not table.controls:
        return f"{undecided} the table has no {'baselines' if not table.baselines else 'controls'}."
    missing = [label for label in (method, *rivals) if len(results.values(label, metric)) < len(table.seeds)]
    if missing:
        return f"{undecided} runs of {_listed(missing)} are missing."
    if len(table.seeds) < 2:
        return f"{undecided} one seed has no spread, at least two are needed."
    mean, spread = mean_and_spread(results.values(method, metric))
    beaten, unbeaten = [], []
    for label in rivals:
        rival_mean, rival_spread = mean_and_spread(results.values(label, metric))
        lead, noise = mean - rival_mean, (spread or 0.0) + (rival_spread or 0.0)
        if lead > noise:
            beaten.append(f"{label} by {_points(lead)}")
        elif abs(lead) <= noise:
            side = "above" if lead > 0 else "below" if lead < 0 else "away"
            unbeaten.append(f"{label} ({_points(lead)} {side}, within the spread of {_points(noise)})")
        else:
            unbeaten.append(f"{label} ({_points(lead)} below)")
    reached = f"{method} with {format_values(metric, results.values(method, metric))}"
    if unbeaten:
        text = f"{name}: no collaboration gain. {reached} does not beat {_listed(unbeaten)}."
        if beaten:
            text += f" It beats {_listed(beaten)}."
    else:
        text = (
            f"{name}: a collaboration gain. {reached} beats every baseline and every control by more than the spread: "
            f"{_listed(beaten)}."
        )
    untrained = results.values(_reference(table), metric, "before")
    if untrained:
        start, start_spread = mean_and_spread(untrained)
        if mean - start <= (spread or 0.0) + (start_spread or 0.0):
            text += f" It is not above the untrained encoder ({format_values(metric, untrained)})."
    return text


def _points(difference: float) -> str:
    return f"{abs(difference):.1f}" if abs(difference) >= 0.05 else "less than 0.1"


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def _cells_of_rows(table: Table, results: Results) -> list[tuple[str, str, list[str]]]:
    """(label, role, formatted cells) a row, the untrained encoders' first; a metric's paper column follows it."""

    def cells(label: str, when: Literal["before", "after"], paper: dict[Any, str]) -> list[str]:
        found = []
        for metric in table.metrics:
            found.append(format_values(metric, results.values(label, metric, when)))
            if _has_paper(table, metric):
                found.append(paper.get(metric, ""))
        return found

    rows = [(UNTRAINED, "", cells(_reference(table), "before", {}))]
    return rows + [
        (row.label, table.role(row.label), cells(row.label, "after", table.paper.get(row.label, {})))
        for row in table.rows
    ]


def _has_paper(table: Table, metric: Any) -> bool:
    return any(metric in figures for figures in table.paper.values())


def _header(table: Table) -> list[str]:
    header = []
    for metric in table.metrics:
        header.append(metric_title(metric))
        if _has_paper(table, metric):
            header.append("in the paper")
    return header


def _reading(table: Table, results: Results) -> str:
    """How to read the figures."""
    seeds = ", ".join(map(str, table.seeds))
    spread = f"Mean ± sample standard deviation over the seeds {seeds}" if len(table.seeds) > 1 else f"Seed {seeds}"
    missing = [
        row.label
        for row in table.rows
        if max((len(results.values(row.label, m)) for m in table.metrics), default=0) < len(table.seeds)
    ]
    unfinished = f" Not all runs of {_listed(missing)} are finished." if missing else ""
    return (
        f"{spread}, each the mean over the clients' models or the global model after the last round; {UNTRAINED} is "
        f"{_reference(table)} before the first.{unfinished}"
    )


_SHORT_TITLES = {"kNN accuracy (%)": "kNN %", "linear accuracy (%)": "linear %"}
_LABEL_WIDTH = 34


def format_table(table: Table, results: Results) -> str:
    """The table as plain text, narrow enough for a terminal."""
    header = [_SHORT_TITLES.get(title, title) for title in _header(table)]
    lines = [["", *header]]
    for label, _, cells in _cells_of_rows(table, results):
        first, *rest = textwrap.wrap(label, _LABEL_WIDTH)
        lines += [[first, *cells], *(["  " + more, *[""] * len(cells)] for more in rest)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rendered = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rendered.insert(1, "-" * max(map(len, rendered)))
    return "\n".join(rendered)


def _write_results(table: Table, results: Results, output: Path, cells: Sequence[_Cell]) -> None:
    for name, text in (("table.md", _markdown(table, results)), ("table.csv", _csv(table, results))):
        write_atomically(output / name, text.encode())
    finished = [cell for cell in cells if cell.finished]
    of_method = [cell for cell in finished if cell.label == _reference(table)]
    figure = _picture(table, results, (of_method or finished)[0].path)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    write_atomically(output / "picture.png", data.getvalue())
    body = html_figure(figure, f"{' '.join(table.description.split())} {verdict(table, results)}", png=True)
    rows = _cells_of_rows(table, results)
    classes = {i: "method" for i, (_, role, _) in enumerate(rows) if role == "method"}
    body += "<h2>Figures</h2>\n" + html_table(
        ["row", "role", *_header(table)], [[label, role, *values] for label, role, values in rows], 2, classes
    )
    body += f'<p class="note">{escape(_reading(table, results))}</p>'
    if table.method is not None:
        sentences = "".join(f"<li>{escape(line)}</li>" for line in verdict(table, results).splitlines())
        body += f"<h2>Verdict</h2>\n<ul>{sentences}</ul>\n<p class=note>{escape(_RULE)}</p>"
    settings = [(row.label, row.recipe, _one_line(row.settings)) for row in table.rows]
    body += "<h2>Rows</h2>\n" + html_table(("row", "recipe", "settings of its own"), settings, text_columns=3)
    if table.settings:
        body += f"<p>All rows: {escape(_one_line(table.settings))}</p>"
    body += (
        "<p class=note>Every run's resolved recipe, metrics and checkpoint stand in the folders beside this page.</p>"
    )
    write_atomically(output / "table.html", page(table.name, body).encode())


_RULE = (
    "The rule: a collaboration gain is said only where the method's mean exceeds the mean of every baseline and of "
    "every control by more than the sum of the two sample standard deviations."
)


def _one_line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in flatten(values).items()) if values else ""


def _markdown(table: Table, results: Results) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    lines = [f"# {table.name}", "", " ".join(table.description.split()), ""]
    header = ["row", "role", *_header(table)]
    lines += [line(header), "|---|---|" + "---:|" * (len(header) - 2)]
    lines += [line([label, role, *cells]) for label, role, cells in _cells_of_rows(table, results)]
    lines += ["", _reading(table, results)]
    if table.method is not None:
        lines += ["", *(f"- {text}" for text in verdict(table, results).splitlines()), "", _RULE]
    return "\n".join(lines) + "\n"


def _csv(table: Table, results: Results) -> str:
    """One line a row, seed and metric; values in full."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("row", "role", "seed", "metric", "value"))
    reference = _reference(table)
    rows = [(UNTRAINED, "", results.before.get(reference, {}))]
    rows += [(row.label, table.role(row.label), results.after.get(row.label, {})) for row in table.rows]
    for label, role, by_metric in rows:
        for metric, by_seed in by_metric.items():
            writer.writerows((label, role, seed, metric, repr(value)) for seed, value in by_seed.items())
    return text.getvalue()


# The picture

_MOST_CLIENTS = 5


def _picture(table: Table, results: Results, path: Path) -> Any:
    """The table's picture; the clients are those of the run in `path`."""
    run = read_run(path)
    panels: dict[str, list[tuple[str, str, list[float], list[float]]]] = {
        metric: [
            (
                row.label,
                table.role(row.label),
                results.values(row.label, metric, "before"),
                results.values(row.label, metric),
            )
            for row in table.rows
        ]
        for metric in table.metrics
    }
    untrained = {m: results.values(_reference(table), m, "before") for m in panels}
    seeds = f"{len(table.seeds)} seeds" if len(table.seeds) > 1 else f"seed {table.seeds[0]}"
    cards, clients = _cards(run), int(run.recipe["partition"]["clients"])
    shown = f", {_MOST_CLIENTS} of them shown" if clients > _MOST_CLIENTS else ""
    data = run.recipe["data"]
    name = Path(data["path"]).stem if data["name"] in ("npz", "folder") else data["name"]
    subtitle = f"{name}, {clients} clients{shown}, {run.rounds} rounds, {seeds}"
    title = " ".join(table.description.split()).partition(". ")[0] or table.name
    return draw_table_picture(title, subtitle, cards, panels, untrained, verdict(table, results))


def _cards(run: Run) -> list[Card]:
    """The clients of a run with some of their images, and the public images."""
    recipe = parse_recipe(dict(run.recipe))
    dataset = load_dataset(recipe.data, recipe.seed)
    rows = partition_indices(dataset.train_labels, recipe.partition, recipe.seed)
    uses_public = any(r.needs_public_images for r in recipe.regularizers) or any(
        a.needs_public_images for a in recipe.aggregators
    )
    cards = []
    for k, mine in enumerate(rows[:_MOST_CLIENTS]):
        labels = dataset.train_labels[mine]
        present = sorted(set(labels.tolist()))
        names = [dataset.class_names[label] for label in present]
        held = f"only {' and '.join(names)}" if len(names) <= 2 else f"{len(names)} classes"
        architecture = recipe.architectures[k % len(recipe.architectures)]
        lines = (textwrap.shorten(held, 26, placeholder=" ..."), architecture, f"{len(mine)} images")
        cards.append(Card(f"client {k}", "\n".join(lines), _mosaic(dataset.train_images[mine], labels)))
    if uses_public and dataset.public_images is not None:
        public = dataset.public_images
        images = _mosaic(public, torch.zeros(len(public), dtype=torch.int64))
        cards.append(Card("public images", f"without labels,\nfor all clients\n{len(public)} images", images))
    return cards


_MOSAIC_ROWS, _MOSAIC_COLUMNS = 3, 4


def _mosaic(images: Tensor, labels: Tensor) -> NDArray[np.uint8]:
    """Some images [n, C, H, W] in a grid, spread evenly over the classes' order: uint8 [h, w] or [h, w, 3]."""
    count = _MOSAIC_ROWS * _MOSAIC_COLUMNS
    order = labels.argsort(stable=True)
    chosen = images[order[torch.linspace(0, len(order) - 1, count).long()]]
    n, channels, height, width = chosen.shape
    framed = torch.full((n, channels, height + 1, width + 1), 255, dtype=torch.uint8)
    framed[:, :, :height, :width] = chosen
    grid = framed.reshape(_MOSAIC_ROWS, _MOSAIC_COLUMNS, channels, height + 1, width + 1).permute(0, 3, 1, 4, 2)
    array: NDArray[np.uint8] = grid.reshape(
        _MOSAIC_ROWS * (height + 1), _MOSAIC_COLUMNS * (width + 1), channels
    ).numpy()
    return array[:-1, :-1, 0] if channels == 1 else array[:-1, :-1]
