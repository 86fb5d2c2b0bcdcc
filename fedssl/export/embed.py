"""The representations of a folder of images or of an .npz file, by an exported encoder."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..data.windows import Window
from ..errors import UserError
from ..evaluation.features import extract_outputs
from ..federation import device_named
from ..run_directory import RunDirectory
from ..storage import make_folder, write_atomically
from .encoder_folder import is_encoder_folder, read_encoder
from .images import image_batches

_MOST_NAMED = 5


def embed_images(
    folder: Path,
    images: Path,
    output: Path,
    *,
    batch_size: int = 256,
    device: str = "auto",
    window: Window | None = None,
    skip_broken: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write `output`, an .npz file with `features` float32 [n, d] and `files`, the n images' names.

    Args:
        folder: an exported encoder.
        images: a folder of image files, nested or flat, or an .npz file. The names in `files` are paths seen from the
            folder, or `ARRAY/ROW` of the .npz file; the order is theirs.
        output: the file to write; an existing one is replaced when the new one is complete.
        batch_size: images that are read and embedded at a time; the features do not depend on it beyond rounding.
        device: `cpu`, `cuda`, or `auto` for CUDA where there is a device.
        window: how pixels of more than 8 bits become 8 bits; by default as in the encoder's run.
        skip_broken: leave out files that cannot be read, instead of refusing all.
        progress: is told after each batch how many of how many images are done.

    Returns:
        What was left out and why, in one line; empty where all could be read.

    Raises:
        UserError: no exported encoder; no images; a file that cannot be read, unless `skip_broken` is set; or a
            representation that is not finite. Nothing is written then.
    """
    if not is_encoder_folder(folder) and (folder / "recipe.yaml").is_file():
        RunDirectory.open(folder)
        raise UserError(f"{folder} is a run's folder: export its encoder first, with fedssl export {folder} FOLDER")
    encoder = read_encoder(folder)
    place = device_named(device)
    network = encoder.network.to(place)
    total, batches = image_batches(images, encoder.image_shape, window or encoder.window, batch_size)
    names: list[str] = []
    features: list[torch.Tensor] = []
    unreadable: list[str] = []
    done = 0
    for batch in batches:
        unreadable += batch.unreadable
        names += batch.names
        done += len(batch.names) + len(batch.unreadable)
        if batch.names and (skip_broken or not unreadable):
            features.append(extract_outputs(network, batch.images))
        progress(done, total)
    if unreadable and not skip_broken:
        raise UserError(f"{_summary(unreadable, total)}; repair or remove them, or leave them out with --skip-broken")
    if not names:
        raise UserError(f"none of the {total} files in {images} can be read as an image: {unreadable[0]}")
    array = torch.cat(features)
    if not torch.isfinite(array).all():
        raise UserError(
            f"the encoder in {folder} gives NaN or infinite values for these images; was its training stable?"
        )
    file = io.BytesIO()
    np.savez(file, features=array.numpy(), files=np.array(names))
    make_folder(output.absolute().parent)
    write_atomically(output, file.getvalue())
    return _summary(unreadable, total) if unreadable else ""


def _summary(unreadable: list[str], total: int) -> str:
    """`2 of 200 files cannot be read: FILE (reason), FILE (reason)`, with at most five of them named."""
    shown = unreadable[:_MOST_NAMED]
    more = f" and {len(unreadable) - len(shown)} more" if len(unreadable) > len(shown) else ""
    return f"{len(unreadable)} of {total} files cannot be read: {', '.join(shown)}{more}"
