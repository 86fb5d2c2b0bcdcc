"""Commands about the encoder that a run ends with: a folder for other programs, and the features of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import print_text


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make; it must not exist or be empty.")],
    client: Annotated[
        int | None, typer.Option(help="Export this client's own model, right after its last training.")
    ] = None,
    shared: Annotated[
        bool, typer.Option("--global", help="Export the global model; the default where the run has one.")
    ] = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write encoder.onnx.")] = False,
    torchscript: Annotated[
        bool, typer.Option("--torchscript", help="Also write encoder.torchscript.pt, traced.")
    ] = False,
    torch_export: Annotated[bool, typer.Option("--export", help="Also write encoder.pt2, by torch.export.")] = False,
) -> None:
    """Export a run's encoder as a folder that timm, or a load.py with torch and timm alone, loads."""
    from ..export.compiled_formats import FILES
    from ..export.encoder_folder import export_encoder

    wanted = {"onnx": onnx, "torchscript": torchscript, "torch-export": torch_export}
    path = export_encoder(run, output, client, shared, [name for name in FILES if wanted[name]])
    print_text(f"The encoder is in {path}; README.md there says how to load it. Try it: python {path / 'load.py'}")
