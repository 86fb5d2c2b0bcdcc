"""Commands that work on runs that have been trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import Trust, print_text


def evaluate(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a run, or one that `fedssl export` has written.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Evaluate on other data: keys of a recipe's data, such as name=npz,path=mine.npz.",
        ),
    ] = None,
    fractions: Annotated[
        list[float] | None,
        typer.Option(
            "--semi-supervised", help="Also fine-tune on this fraction of the labels, above 0 and up to 1; repeatable."
        ),
    ] = None,
    fine_tune: Annotated[
        Literal["train", "validation"] | None,
        typer.Option(help="Also fine-tune on all labels of these images, for macro precision, recall and F1."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Evaluate a run's last checkpoint or an exported encoder: kNN and linear accuracy, and fine-tuning on request."""
    from ..evaluation.fine_tune import FineTuneOptions
    from ..export.encoder_folder import is_encoder_folder
    from ..reports.evaluation import evaluate_export, evaluate_run, parse_data

    options = FineTuneOptions(images=fine_tune) if fine_tune else None
    other = None if data is None else parse_data(data)
    if is_encoder_folder(folder):
        path = evaluate_export(folder, other, fractions or [], options)
    else:
        path = evaluate_run(folder, fractions or [], note=print_text, fine_tune=options, data=other, trust=trust)
    print_text(path.read_text(encoding="utf-8").rstrip())
    print_text(f"The table is in {path}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of one or more runs.")],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write; RUN/report.html by default, or report.html for several runs."),
    ] = None,
    collapse: Annotated[
        bool,
        typer.Option(help="Also check whether representations have collapsed; this loads the run's images."),
    ] = True,
    images: Annotated[
        bool,
        typer.Option(help="Also show images of the data as the encoder sees them; the page then holds these images."),
    ] = True,
    trust: Trust = False,
) -> None:
    """Write an HTML page with curves, tables, the partition and pictures of the representations."""
    from ..reports.report import write_report

    print_text(f"The report is in {write_report(runs, output, collapse, trust, images)}")
