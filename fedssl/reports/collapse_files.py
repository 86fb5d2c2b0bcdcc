"""The files of a run's collapse analysis, which later reports read.

RUN/collapse.json    the figures, see `Collapse`
RUN/figures/*.png    the pictures of FedU2's Figures 3, 4 and 5
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter

from ..errors import UserError
from ..federation import federation_of_run
from ..run_directory import RunDirectory
from ..storage import make_folder, write_atomically
from ..untrusted.files import read_regular_file
from .collapse import FORMAT, Collapse, analyse_collapse
from .collapse_plots import draw_log_singular_values, draw_spheres, draw_tsne
from .metrics import LARGEST_FIGURE
from .plots import png_bytes

_FILE = "collapse.json"
_LARGEST_DIMENSION = 2**16  # of a stored analysis


def collapse_of_run(path: Path, trust: bool = False) -> Collapse | None:
    """The collapse analysis of a run's last round. It is made where it is not stored already.

    It is stored in the run's folder where that can be written.

    Args:
        path: the run's folder.
        trust: run the code of parts of one's own that the run's recipe names.

    Returns:
        The analysis; None where no round is finished.

    Raises:
        UserError: the run's data are no longer there, a state cannot be read, representations are not finite, or
            the recipe names code that is not trusted.
    """
    directory = RunDirectory.open(path)
    checkpoint = directory.checkpoint
    if checkpoint.round < 1 or not checkpoint.files:
        return None
    stored = _read(path / _FILE)
    if stored is not None and stored.round == checkpoint.round:
        return stored
    analysis = analyse_collapse(federation_of_run(directory, trust), directory)
    with suppress(UserError):  # a folder that cannot be written is read all the same
        _write(analysis, path)
    return analysis


def _read(path: Path) -> Collapse | None:
    """A stored analysis; None where there is none of this format, which somebody else may have written."""
    try:
        analysis = TypeAdapter(Collapse).validate_json(read_regular_file(path))
    except (OSError, ValueError):
        return None
    return analysis if analysis.format == FORMAT and _can_be_drawn(analysis) else None


def _can_be_drawn(analysis: Collapse) -> bool:
    """Whether all lists have the lengths that the charts rely on, and all figures are finite."""
    images, classes = len(analysis.labels), len(analysis.class_names)
    models, tsne = analysis.models, list(analysis.tsne.values())
    figures = [value for one in models.values() for value in (*chain(*one.sphere), *one.log_singular_values)]
    figures += [value for points in tsne for value in chain(*points)]
    figures += [value for one in models.values() for value in (one.alignment, one.uniformity, one.effective_rank)]
    return (
        images > 0
        and all(0 <= label < classes for label in analysis.labels)
        and len(models) > 0
        and all(re.fullmatch(r"global|[0-9]{1,9}", who) for who in models)
        and all(0 < one.dimension <= _LARGEST_DIMENSION and one.log_singular_values for one in models.values())
        and all(len(one.sphere) == images and all(len(point) == 3 for point in one.sphere) for one in models.values())
        and len(tsne) in (0, 2)
        and all(len(points) == len(tsne[0]) <= images and all(len(p) == 2 for p in points) for points in tsne)
        and all(math.isfinite(value) and abs(value) < LARGEST_FIGURE for value in figures)
        and all(math.isfinite(one.coverage) for one in models.values())
    )


def _write(analysis: Collapse, path: Path) -> None:
    folder = path / "figures"
    make_folder(folder)
    by_method = {path.name: analysis}
    for name, figure in (
        ("log_singular_values", draw_log_singular_values(by_method)),
        ("sphere", draw_spheres(by_method)),
        ("tsne", draw_tsne(by_method)),
    ):
        if figure is not None:
            write_atomically(folder / f"{name}.png", png_bytes(figure))
    # Written last: where collapse.json is there, so are the figures.
    write_atomically(path / _FILE, json.dumps(asdict(analysis)).encode())
