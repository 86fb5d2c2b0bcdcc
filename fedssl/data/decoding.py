"""Many image files as one tensor, in memory or in a cache file; all headers are read first, before any decoding."""

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UserError
from ..run_folder.storage import cannot_write, make_folder, write_atomically
from ..untrusted import printable
from .files import listed, notify
from .image_files import BrokenImageError, ImageKind, image_kind, read_pixels, value_range
from .options import DataOptions
from .pixels import Window
from .stored_images import Images, available_memory, open_stored_images, readable_bytes

_CACHE_VERSION = 1
_SHARE_OF_MEMORY = 0.25  # a holdout and the deal to the clients each copy the images
_FILES_FOR_RANGE = 20
_MOST_NAMED = 5
_SECONDS_BETWEEN_LINES = 10.0  # of progress, on stderr

_Store = Callable[[NDArray[np.uint8]], Any]


def decode_images(
    files: Sequence[Path], options: DataOptions, height: int, width: int, in_memory: bool = False
) -> tuple[Images, list[int]]:
    """Read image files, at least one, at one size in pixels, see `read_pixels`.

    What takes more than `options.memory_limit` is decoded into a file, once, unless `in_memory` is True.

    Returns:
        uint8 [n, C, H, W], where C is 1 if every file is gray and else 3; and which of the files they are, ascending,
        which is all of them unless broken ones are skipped.

    Raises:
        UserError: files are broken, none is left, the window does not suit them, or the disk has no room.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of files that are read all the same or named as broken
        limit = _SHARE_OF_MEMORY * available_memory() if options.memory_limit is None else options.memory_limit * 1e9
        cache = None
        if not in_memory and len(files) * 3 * height * width > limit:
            cache = _cache_path(files, f"{height} {width} {options.window}")
            cached = _read_cache(cache)
            if cached is not None:
                stored, kept, faults = cached
                report_broken(files, faults, options.broken)
                return stored, kept
        kinds, faults = _read_headers(files, options.window)
        readable = {index: files[index] for index in kinds}
        shape = 1 if all(kind.gray for kind in kinds.values()) else 3, height, width
        needed = len(readable) * math.prod(shape)
        if cache is None or needed <= limit:  # gray images take a third
            images = torch.empty((len(readable), *shape), dtype=torch.uint8)
            rows = iter(images.numpy())
            kept = _decode(readable, shape, options.window, faults, lambda pixels: np.copyto(next(rows), pixels))
            report_broken(files, faults, options.broken)
            return images[: len(kept)], kept
        notify(f"decoding {len(readable):,} images once, into {printable(cache)} ({readable_bytes(needed)})")
        with _new_file(cache, needed) as file:
            kept = _decode(readable, shape, options.window, faults, lambda pixels: file.write(pixels.tobytes()))
            report_broken(files, faults, options.broken)
        described = {"shape": shape, "kept": kept, "faults": faults}
        write_atomically(cache.with_suffix(".json"), json.dumps(described).encode())
        return open_stored_images(cache, shape, len(kept)), kept


def _cache_path(files: Sequence[Path], decoded_as: str) -> Path:
    """Return the path of the cache, a file of pixels and nothing else. NAME.json, written last, makes it valid.

    Its name is a digest of what decides the pixels: the files' names, sizes and times of change, and the decoding.
    """
    from PIL import __version__ as pillow_version

    digest = hashlib.sha256(f"{_CACHE_VERSION} {pillow_version} {decoded_as}".encode())
    for file in files:
        try:
            status = os.stat(file)
            state = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            state = "missing"
        digest.update(os.fsencode(os.path.abspath(file)) + b"\0" + state.encode() + b"\0")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedssl" / "decoded"
    return folder / f"{digest.hexdigest()[:32]}.images"


def _read_cache(cache: Path) -> tuple[Images, list[int], dict[int, str]] | None:
    """Return the images that an earlier run decoded, which files they are, and why others cannot be read; or None."""
    try:
        stored = json.loads(cache.with_suffix(".json").read_text(encoding="utf-8"))
        channels, height, width = stored["shape"]
        kept, faults = stored["kept"], {int(index): reason for index, reason in stored["faults"].items()}
        if cache.stat().st_size != len(kept) * channels * height * width:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return open_stored_images(cache, (channels, height, width), len(kept)), kept, faults


@contextmanager
def _new_file(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Open a temporary file of at most `size` bytes, which becomes `path` if nothing fails and else is removed."""
    make_folder(path.parent)
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise UserError(
            f"the decoded images need {readable_bytes(size)} in {printable(path.parent)}, where "
            f"{readable_bytes(free)} are free; free some space, let XDG_CACHE_HOME name a folder on another disk, "
            "or raise data.memory_limit"
        )
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            temporary = Path(file.name)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def report_broken(files: Sequence[Path], faults: dict[int, str], broken: Literal["refuse", "skip"]) -> None:
    """Name the files that cannot be read, by index with the reason; raise a UserError unless they may be skipped."""
    if not faults:
        return
    reasons = [(printable(files[index]), reason) for index, reason in sorted(faults.items())]
    which = f"{reasons[0][0]} cannot be read as an image ({reasons[0][1]})"
    if len(reasons) > 1:
        named = listed([f"{file} ({reason})" for file, reason in reasons], _MOST_NAMED)
        which = f"{len(faults)} of {len(files)} files cannot be read as images: {named}"
    if broken == "refuse":
        raise UserError(f"{which}; repair or remove {'it' if len(faults) == 1 else 'them'}, or set data.broken=skip")
    if len(faults) == len(files):
        raise UserError(f"{which}; no image is left, so set data.path to another folder")
    notify(f"{which}; skipped")


def _read_headers(files: Sequence[Path], window: Window | None) -> tuple[dict[int, ImageKind], dict[int, str]]:
    """Return the kinds of the files by index, and the reasons of those that cannot be read."""
    kinds: dict[int, ImageKind] = {}
    faults: dict[int, str] = {}
    for index, file in enumerate(files):
        try:
            kinds[index] = image_kind(file)
        except BrokenImageError as error:
            faults[index] = str(error)
    _check_window(files, kinds, window)
    several = [str(files[index]) for index, kind in kinds.items() if kind.frames > 1]
    if several:
        what = "1 file holds" if len(several) == 1 else f"{len(several):,} files hold"
        notify(f"{what} several images, of which the first is used: {listed(several, _MOST_NAMED)}")
    return kinds, faults


def _check_window(files: Sequence[Path], kinds: dict[int, ImageKind], window: Window | None) -> None:
    """Raise a UserError if files have more than 8 bits a channel, and the window does not say what to do."""
    colour = [index for index, kind in kinds.items() if kind.deep == "colour"]
    if colour and window != "full":
        raise UserError(
            f"{printable(files[colour[0]])} has colours of 16 bits, of which only the upper 8 bits can be read; set "
            "data.window=full if that is meant, or convert the files to 8 bits a channel"
        )
    gray = [index for index, kind in kinds.items() if kind.deep == "gray"]
    if gray and window is None:
        first, low, high = _range_of_values([files[index] for index in gray])
        own = "" if kinds[gray[0]].own_window is None else ", or data.window=file (what each DICOM file names)"
        raise UserError(
            f"{printable(first)} has pixels of more than 8 bits, as {len(gray)} of {len(files)} files have (values "
            f"{low:g} to {high:g} in the first {min(len(gray), _FILES_FOR_RANGE)}); set "
            f"data.window=[{low:g},{high:g}] or another range that becomes 0 to 255, or data.window=full (the range "
            f"of the type), or data.window=per_image{own}"
        )
    without = [index for index in gray if kinds[index].own_window is None]
    if without and window == "file":
        raise UserError(
            f"{printable(files[without[0]])} names no window of its own, as {len(without)} of {len(files)} files; set "
            "data.window=[LOW,HIGH]"
        )
    floats = [index for index in gray if kinds[index].type_range is None]
    if floats and window == "full":
        raise UserError(
            f"{printable(files[floats[0]])} has floats, which have no full range; set data.window=[LOW,HIGH] or "
            "data.window=per_image"
        )


def _range_of_values(files: Sequence[Path]) -> tuple[Path, float, float]:
    """Return the first file that can be read, and the smallest and largest pixel value of the first files."""
    ranges = {}
    for file in files[:_FILES_FOR_RANGE]:
        try:
            ranges[file] = value_range(file)
        except BrokenImageError as error:
            reason = str(error)
    if not ranges:
        raise UserError(f"cannot be read as an image: {printable(files[0])} ({reason}); repair or remove it")
    return next(iter(ranges)), min(low for low, _ in ranges.values()), max(high for _, high in ranges.values())


def _decode(
    readable: dict[int, Path], shape: tuple[int, int, int], window: Window | None, faults: dict[int, str], store: _Store
) -> list[int]:
    """Give the pixels of the files to `store` in order, and return the indices of those that can be read.

    Add the reasons of the others to `faults`. Pillow decodes outside Python's lock, so threads do it.
    """
    channels, height, width = shape

    def read(index: int) -> NDArray[np.uint8] | str:
        try:
            return read_pixels(readable[index], height, width, channels, window)
        except BrokenImageError as error:
            return str(error)

    workers = os.cpu_count() or 1
    kept: list[int] = []
    last_line = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        remaining, done = iter(readable), 0
        for chunk in iter(lambda: list(islice(remaining, 16 * workers)), []):  # bounds what waits for its turn
            for index, pixels in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(pixels, str):
                    faults[index] = pixels
                else:
                    store(pixels)
                    kept.append(index)
            done += len(chunk)
            if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                print(f"fedssl: decoding images: {done:,} of {len(readable):,}", file=sys.stderr, flush=True)
    return kept
