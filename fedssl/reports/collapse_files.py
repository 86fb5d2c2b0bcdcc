"""The files of a run's collapse analysis, which later reports read.

RUN/collapse.json    the figures, see `Collapse`
RUN/figures/*.png    the pictures of FedU2's Figures 3, 4 and 5
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ..errors import UserError
from ..federation import federation_of_run
from ..run_directory import RunDirectory
from ..storage import make_folder, write_atomically
from ..untrusted.files import read_regular_file
from .collapse import FORMAT, Collapse, Geometry, analyse_collapse
from .collapse_plots import draw_log_singular_values, draw_spheres, draw_tsne
from .plots import png_bytes

_FILE = "collapse.json"


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
    """A stored analysis; None where there is none of this format."""
    try:
        values = json.loads(read_regular_file(path))
        if values.get("format") != FORMAT:
            return None
        models = {who: Geometry(**geometry) for who, geometry in values.pop("models").items()}
        return Collapse(models=models, **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


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
