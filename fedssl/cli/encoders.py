"""Commands about the encoder that a run ends with: a folder for other programs, and the features of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import Trust, console, print_text


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
    trust: Trust = False,
) -> None:
    """Export a run's encoder as a folder that timm, or a load.py with torch and timm alone, loads."""
    from ..export.compiled_formats import FILES
    from ..export.encoder_folder import export_encoder

    wanted = {"onnx": onnx, "torchscript": torchscript, "torch-export": torch_export}
    path = export_encoder(run, output, client, shared, [name for name in FILES if wanted[name]], trust)
    print_text(f"The encoder is in {path}; README.md there says how to load it. Try it: python {path / 'load.py'}")


def embed(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that `fedssl export` has written.")],
    images: Annotated[
        Path, typer.Argument(metavar="IMAGES", help="Folder of images, nested or flat, or an .npz file.")
    ],
    output: Annotated[Path, typer.Option(help="File to write: the arrays `features` and `files`.")] = Path(
        "features.npz"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Images that are read and embedded at a time.")] = 256,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute; auto is CUDA where there is a device.")
    ] = "auto",
    window: Annotated[
        str | None,
        typer.Option(
            help="LOW,HIGH, full or per_image: how pixels of more than 8 bits become 8 bits; as in the run by default."
        ),
    ] = None,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out files that cannot be read, and name them.")
    ] = False,
) -> None:
    """Write the representations of images, with the images' names, by an exported encoder."""
    from rich.progress import Progress

    from ..data.windows import parse_window
    from ..export.embed import embed_images

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("images", total=None)
        left_out = embed_images(
            folder,
            images,
            output,
            batch_size=batch_size,
            device=device,
            window=None if window is None else parse_window(window),
            skip_broken=skip_broken,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if left_out:
        print_text(f"Left out: {left_out}")
    print_text(f"The features are in {output}, as the arrays features and files")
