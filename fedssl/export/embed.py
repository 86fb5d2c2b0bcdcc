"""The representations of a folder of images or of an .npz file, computed by an exported encoder."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.files import IMAGE_SUFFIXES, kind_of, list_files, notify_of_left_out, remedy
from ..data.image_files import BrokenImageError, image_kind, read_pixels
from ..data.npz import images_in
from ..data.pixels import Window, in_channels, resize
from ..data.stored_images import range_of_float_files
from ..errors import UserError, explained
from ..evaluation.features import extract_outputs
from ..federation import device_named
from ..models.encoders import PatchFeatures
from ..run_folder.storage import csv_text, make_folder, require_file_name, write_atomically
from ..untrusted import listed, printable, quoted
from .encoder_folder import is_encoder_folder, read_encoder
from .trained_encoder import TrainedEncoder

#: the arrays of images that an .npz file may have, in the order in which they are read
_ARRAYS = ("x", "x_train", "x_val", "x_test", "train_images", "val_images", "test_images")
_AT_A_TIME = 256  # images that are read and embedded; the features do not depend on it beyond rounding
#: the images' names, the images as uint8 [n, C, H, W], and the files that cannot be read, each with the reason
ImageBatch = tuple[list[str], Tensor, list[str]]


def embed_images(
    folder: Path,
    images: Path | Sequence[Path],
    output: Path,
    *,
    patches: bool = False,
    window: Window | None = None,
    skip_broken: bool = False,
    follow_links: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write the representations of images, float32 [n, d], and the n images' names.

    Args:
        folder: an exported encoder.
        images: a folder of image files, nested or flat, or an .npz file, or several. The names are paths relative to
            the folder, or `ARRAY/ROW` of the .npz file, in its order; of several, each begins with its folder or file
            as given. Images are cropped and resized to the encoder's shape. A grey image becomes three equal channels
            for an encoder of colour images; a colour image becomes grey (luma) for an encoder of grey ones. Other
            encoders need images of their number of channels.
        output: the file to write: `.npz` with the arrays `features` and `files`, or `.csv` with the columns `file`,
            `feature_0`, ...
        patches: write the features before they are pooled, float32 [n, H', W', d] (`PatchFeatures`).
        window: how pixels of more than 8 bits become 8 bits (default: as in the encoder's run).
        skip_broken: leave out files that cannot be read, instead of refusing all.
        follow_links: also read what links in a folder lead to outside it, instead of refusing the folder.
        progress: called after each batch with the number of images done and the number of all.

    Returns:
        The files that were left out and the reasons, in one line; empty if all could be read.

    Raises:
        UserError: `output` cannot be written, has another ending, or is a table for `patches`; no exported encoder, or
            none with patches; no images; one folder given twice; a broken file without `skip_broken`; or a
            representation that is not finite. Nothing is written then.
    """
    require_file_name(output)
    if output.suffix not in (".csv", ".npz"):
        raise UserError(f"{output}: features are written as .npz, or as .csv: name such a file")
    if patches and output.suffix == ".csv":
        raise UserError(f"{output}: a row of a table cannot hold the features of each patch: name a .npz file")
    sources = [images] if isinstance(images, Path) else list(images)
    if len({*map(os.path.realpath, sources)}) < len(sources):
        raise UserError(f"{', '.join(map(str, sources))}: one of these is given twice; name each once")
    if not is_encoder_folder(folder) and (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is a run's folder: export its encoder first: fedssl export {quoted(folder)} FOLDER")
    encoder = read_encoder(folder)
    network = encoder.network
    if patches:
        network = PatchFeatures(network)
        claim = f"the last features of {encoder.architecture} are in no known form of a grid"
        with explained(claim, "; leave --patches out"), torch.no_grad():
            network(torch.zeros(1, *encoder.image_shape))
    network.to(device_named("auto"))
    each = [_batches(source, encoder, window or encoder.window, follow_links) for source in sources]
    total = sum(count for count, _ in each)
    names: list[str] = []
    features: list[Tensor] = []
    unreadable: list[str] = []
    for source, (_, batches) in zip(sources, each, strict=True):
        prefix = f"{printable(source)}/" if len(sources) > 1 else ""
        for batch_names, pixels, batch_unreadable in batches:
            unreadable += batch_unreadable
            names += [prefix + name for name in batch_names]
            if batch_names and (skip_broken or not unreadable):
                features.append(extract_outputs(network, pixels))
            progress(len(names) + len(unreadable), total)
    summary = f"{len(unreadable)} of {total} files cannot be read: {listed(unreadable, most=5)}"
    if not names:
        raise UserError(
            f"none of the {total} files in {listed([*map(str, sources)])} can be read as an image: {unreadable[0]}"
        )
    if unreadable and not skip_broken:
        raise UserError(f"{summary}; repair or remove them, or leave them out with --skip-broken")
    array = torch.cat(features)
    if not torch.isfinite(array).all():
        problem = "gives NaN or infinite values for these images; was its training stable?"
        raise UserError(f"the encoder in {folder} {problem}")
    make_folder(output.absolute().parent)
    write_atomically(output, _file_content(output.suffix, names, array.numpy()))
    return summary if unreadable else ""


def _file_content(suffix: str, names: list[str], features: np.ndarray) -> bytes:
    """Return the content of a file with images' names and features; a .csv file holds float32 values exactly."""
    if suffix == ".csv":
        columns = [f"feature_{i}" for i in range(features.shape[1])]
        rows = ([name, *map(str, row)] for name, row in zip(names, features, strict=True))
        return csv_text([["file", *columns], *rows], as_texts=False).encode()
    file = io.BytesIO()
    np.savez(file, features=features, files=np.array(names))
    return file.getvalue()


def _batches(
    source: Path, encoder: TrainedEncoder, window: Window | None, follow_links: bool
) -> tuple[int, Iterator[ImageBatch]]:
    """Return the number of images or files in a folder or an .npz file, and the images in batches, in their order."""
    kind = kind_of(source)
    if kind == "missing":
        raise UserError(f"there is no folder or file {printable(source)}: expected a folder of images or an .npz file")
    if kind != "folder":
        channels = encoder.image_shape[0]
        with _as_options():
            arrays = images_in(source, _ARRAYS, window, None if channels in (1, 3) else channels)
        return sum(map(len, arrays.values())), _from_arrays(arrays, encoder.image_shape)
    files, others = list_files(source, follow_links)
    notify_of_left_out(others, source)
    files.sort()
    if not files:
        raise UserError(
            f"{printable(source)} holds no image; images end with {', '.join(IMAGE_SUFFIXES)}{remedy(others)}"
        )
    return len(files), _from_files(source, files, encoder, window)


def _from_files(
    folder: Path, files: Sequence[Path], encoder: TrainedEncoder, window: Window | None
) -> Iterator[ImageBatch]:
    channels, height, width = shape = encoder.image_shape
    asked_for = encoder.channels if channels in (1, 3) else channels
    with _as_options():
        window = window or range_of_float_files(files, asked_for)
    for start in range(0, len(files), _AT_A_TIME):
        names, images, unreadable = [], [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, as in decode_images
            for file in files[start : start + _AT_A_TIME]:
                try:
                    if window is None and image_kind(file, asked_for).deep:
                        raise UserError(
                            f"{printable(file)} has pixels of more than 8 bits, and the encoder was trained on images "
                            "of 8 bits: give --window LOW,HIGH, the values that become 0 and 255"
                        )
                    images.append(read_pixels(file, height, width, channels, window, asked_for))
                    names.append(printable(file.relative_to(folder).as_posix()))
                except BrokenImageError as error:
                    unreadable.append(f"{printable(file)} ({_with_option(str(error))})")
        pixels = torch.from_numpy(np.stack(images)) if images else torch.empty(0, *shape, dtype=torch.uint8)
        yield names, pixels, unreadable


@contextmanager
def _as_options() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(_with_option(str(error))) from error


def _with_option(message: str) -> str:
    """Name the option of `fedssl embed` in place of that of a run."""
    told = message.partition(", or data.window=percentiles")[0]  # which come from all training images
    return told.replace("data.window=", "--window ").replace("data.window", "--window")


def _from_arrays(arrays: dict[str, Tensor], shape: tuple[int, int, int]) -> Iterator[ImageBatch]:
    channels, height, width = shape
    for name, array in arrays.items():
        for start in range(0, len(array), _AT_A_TIME):
            images = in_channels(array[start : start + _AT_A_TIME], channels)
            if images.shape[2:] != (height, width):
                images = resize(images, height, width)
            yield [f"{name}/{start + row}" for row in range(len(images))], images, []
