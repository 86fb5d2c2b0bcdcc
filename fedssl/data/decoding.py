"""Image files as one tensor: all headers are read first, so that nothing is decoded in vain."""

import hashlib
import json
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UserError
from ..run.storage import cannot_write, make_folder, write_atomically
from .files import ProgressLines, listed, notify, printable
from .image_files import BrokenImageError, ImageKind, image_kind, read_pixels, value_range
from .options import DataOptions
from .pixels import Window
from .stored_images import Images, StoredImages, available_memory, open_stored_images, readable_bytes

_VERSION = 1


@dataclass(frozen=True)
class CachedImages:
    """What a cache holds.

    Attributes:
        images: in the cache's file.
        kept: which of the files they are, ascending.
        faults: why each of the other files cannot be read, by index.
    """

    images: StoredImages
    kept: list[int]
    faults: dict[int, str]


class DecodedCache:
    """The cache of certain files at a certain size: two files in the user's cache folder.

    Its name is a digest of the files' names, sizes and times of change, and of all that decides how they are decoded;
    so a file that is changed, or another image size, leads to another cache. NAME.json, written last, makes it valid.

    Attributes:
        path: the file of pixels; it holds nothing but those.
    """

    def __init__(self, files: Sequence[Path], decoded_as: str):
        """Nothing is read or written yet, but that the files are looked at.

        Args:
            files: image files.
            decoded_as: the size, window and whatever else decides the pixels.
        """
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedssl" / "decoded"
        digest = _digest(files, decoded_as)
        self.path, self._description = folder / f"{digest}.images", folder / f"{digest}.json"

    def read(self) -> CachedImages | None:
        """What an earlier run has decoded; None where no run has."""
        try:
            stored = json.loads(self._description.read_text(encoding="utf-8"))
            channels, height, width = stored["shape"]
            kept, faults = stored["kept"], {int(index): reason for index, reason in stored["faults"].items()}
            complete = self.path.stat().st_size == len(kept) * channels * height * width
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not complete:
            return None
        return CachedImages(open_stored_images(self.path, (channels, height, width), len(kept)), kept, faults)

    def write(
        self,
        decoded: Iterable[tuple[int, NDArray[np.uint8] | str]],
        shape: tuple[int, int, int],
        count: int,
        faults: dict[int, str],
    ) -> tuple[list[int], Path]:
        """Write pixels one after another into a temporary file beside the cache's; `commit` makes it the cache.

        Args:
            decoded: the pixels of each file by index, uint8 of that shape, or why the file cannot be read.
            shape: channels, height and width.
            count: how many images there will be at most.
            faults: gets the reasons of the files that cannot be read.

        Returns:
            Which of the files were written, and the temporary file.

        Raises:
            UserError: the disk has no room, or may not be written.
        """
        make_folder(self.path.parent)
        needed, free = count * int(np.prod(shape)), shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(
                f"the decoded images need {readable_bytes(needed)} in {printable(self.path.parent)}, where "
                f"{readable_bytes(free)} are free; free some space, let XDG_CACHE_HOME name a folder on another disk, "
                "or raise data.memory_limit"
            )
        kept: list[int] = []
        temporary: Path | None = None
        try:
            with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".partial", delete=False) as file:
                temporary = Path(file.name)
                for index, pixels in decoded:
                    if isinstance(pixels, str):
                        faults[index] = pixels
                    else:
                        file.write(np.ascontiguousarray(pixels).data)
                        kept.append(index)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise cannot_write(self.path, error) from error
            raise
        return kept, temporary

    def commit(
        self, temporary: Path, shape: tuple[int, int, int], kept: list[int], faults: dict[int, str]
    ) -> StoredImages:
        """Make a temporary file that `write` has written the cache, and open it."""
        try:
            os.replace(temporary, self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        described = {"shape": shape, "kept": kept, "faults": faults}
        write_atomically(self._description, json.dumps(described).encode())
        return open_stored_images(self.path, shape, len(kept))


def _digest(files: Sequence[Path], decoded_as: str) -> str:
    from PIL import __version__ as pillow_version

    digest = hashlib.sha256(f"{_VERSION} {pillow_version} {decoded_as}".encode())
    for file in files:
        try:
            status = os.stat(file)
            state = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            state = "missing"
        digest.update(os.fsencode(os.path.abspath(file)) + b"\0" + state.encode() + b"\0")
    return digest.hexdigest()[:32]


_SHARE_OF_MEMORY = 0.25  # a holdout and the deal to the clients each copy the images


_FILES_FOR_RANGE = 20


_MOST_NAMED = 5


@dataclass(frozen=True)
class Decoding:
    """How files are decoded.

    Attributes:
        height, width: of the result, in pixels.
        window: how pixels of more than 8 bits become 8 bits; None refuses such files.
        broken: what to do where files cannot be read: name them and raise, or name them and go on without them.
        memory_limit: bytes of decoded images that are held in memory; more are decoded into a file, once. None: hold
            all in memory.
    """

    height: int
    width: int
    window: Window | None
    broken: Literal["refuse", "skip"]
    memory_limit: int | None = None

    @classmethod
    def of(cls, options: DataOptions, height: int, width: int) -> "Decoding":
        """As a dataset's options say."""
        limit = _SHARE_OF_MEMORY * available_memory() if options.memory_limit is None else options.memory_limit * 1e9
        return cls(height, width, options.window, options.broken, int(limit))


@dataclass(frozen=True)
class DecodedImages:
    """Images of files.

    Attributes:
        images: uint8 [n, C, H, W]; C is 1 where every file is gray, and 3 otherwise.
        kept: which of the files they are, ascending; all of them unless broken ones are skipped.
    """

    images: Images
    kept: list[int]


def decode_images(files: Sequence[Path], decoding: Decoding) -> DecodedImages:
    """Read image files at one size, see `read_pixels`.

    Args:
        files: at least one.
        decoding: how.

    Raises:
        UserError: files are broken, none is left, or the window does not suit them; or the disk has no room for what
            does not fit into the memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of files that are read all the same or named as broken
        limit, largest = decoding.memory_limit, len(files) * 3 * decoding.height * decoding.width
        if limit is None or largest <= limit:
            return _decode_into_memory(files, decoding)
        return _decode_into_file(files, decoding, limit)


def _decode_into_memory(files: Sequence[Path], decoding: Decoding) -> DecodedImages:
    faults: dict[int, str] = {}
    kinds = _read_headers(files, decoding.window, faults)
    return _into_memory(files, kinds, decoding, faults)


def _into_memory(
    files: Sequence[Path], kinds: dict[int, ImageKind], decoding: Decoding, faults: dict[int, str]
) -> DecodedImages:
    images = torch.empty((len(kinds), *_shape(kinds, decoding)), dtype=torch.uint8)
    rows = images.numpy()
    kept: list[int] = []
    for index, pixels in _decoded(files, kinds, decoding):
        if isinstance(pixels, str):
            faults[index] = pixels
        else:
            rows[len(kept)] = pixels
            kept.append(index)
    report_broken(files, faults, decoding.broken)
    return DecodedImages(images[: len(kept)], kept)


def _decode_into_file(files: Sequence[Path], decoding: Decoding, limit: int) -> DecodedImages:
    cache = DecodedCache(files, f"{decoding.height} {decoding.width} {decoding.window}")
    cached = cache.read()
    if cached is not None:
        report_broken(files, cached.faults, decoding.broken)
        return DecodedImages(cached.images, cached.kept)
    faults: dict[int, str] = {}
    kinds = _read_headers(files, decoding.window, faults)
    shape = _shape(kinds, decoding)
    needed = len(kinds) * math.prod(shape)
    if needed <= limit:  # they are gray
        return _into_memory(files, kinds, decoding, faults)
    notify(f"decoding {len(kinds):,} images once, into {printable(cache.path)} ({readable_bytes(needed)})")
    kept, temporary = cache.write(_decoded(files, kinds, decoding), shape, len(kinds), faults)
    try:
        report_broken(files, faults, decoding.broken)
        return DecodedImages(cache.commit(temporary, shape, kept, faults), kept)
    finally:
        temporary.unlink(missing_ok=True)


def _shape(kinds: dict[int, ImageKind], decoding: Decoding) -> tuple[int, int, int]:
    return 1 if all(kind.gray for kind in kinds.values()) else 3, decoding.height, decoding.width


def report_broken(files: Sequence[Path], faults: dict[int, str], broken: Literal["refuse", "skip"]) -> None:
    """Name the files that cannot be read, by index with the reason; raise a UserError unless they may be skipped."""
    if not faults:
        return
    reasons = [(printable(files[index]), reason) for index, reason in sorted(faults.items())]
    if len(reasons) == 1:
        which = f"{reasons[0][0]} cannot be read as an image ({reasons[0][1]})"
    else:
        named = listed([f"{file} ({reason})" for file, reason in reasons], _MOST_NAMED)
        which = f"{len(faults)} of {len(files)} files cannot be read as images: {named}"
    if broken == "refuse":
        raise UserError(f"{which}; repair or remove {'it' if len(faults) == 1 else 'them'}, or set data.broken=skip")
    if len(faults) == len(files):
        raise UserError(f"{which}; no image is left, so set data.path to another folder")
    notify(f"{which}; skipped")


def _read_headers(files: Sequence[Path], window: Window | None, faults: dict[int, str]) -> dict[int, ImageKind]:
    """The kinds of the files by index; the reasons of those that cannot be read go to `faults`.

    Raises:
        UserError: the window does not suit the files.
    """
    kinds = {}
    for index, file in enumerate(files):
        try:
            kinds[index] = image_kind(file)
        except BrokenImageError as error:
            faults[index] = str(error)
    _check_window(files, kinds, window)
    _notify_of_frames(files, kinds)
    return kinds


def _check_window(files: Sequence[Path], kinds: dict[int, ImageKind], window: Window | None) -> None:
    """Raise a UserError where files have more than 8 bits a channel, and the window does not say what to do."""
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
    """The first file that can be read, and the smallest and largest pixel value of the first files."""
    ranges = {}
    for file in files[:_FILES_FOR_RANGE]:
        try:
            ranges[file] = value_range(file)
        except BrokenImageError as error:
            reason = str(error)
    if not ranges:
        raise UserError(f"cannot be read as an image: {printable(files[0])} ({reason}); repair or remove it")
    return next(iter(ranges)), min(low for low, _ in ranges.values()), max(high for _, high in ranges.values())


def _notify_of_frames(files: Sequence[Path], kinds: dict[int, ImageKind]) -> None:
    several = [str(files[index]) for index, kind in kinds.items() if kind.frames > 1]
    if several:
        what = "1 file holds" if len(several) == 1 else f"{len(several):,} files hold"
        notify(f"{what} several images, of which the first is used: {listed(several, _MOST_NAMED)}")


def _decoded(
    files: Sequence[Path], kinds: dict[int, ImageKind], decoding: Decoding
) -> Iterator[tuple[int, NDArray[np.uint8] | str]]:
    """The pixels of each file in order, or why it cannot be read. Pillow decodes outside Python's lock: threads do."""
    channels, height, width = _shape(kinds, decoding)

    def read(index: int) -> NDArray[np.uint8] | str:
        try:
            return read_pixels(files[index], height, width, channels, decoding.window)
        except BrokenImageError as error:
            return str(error)

    workers = os.cpu_count() or 1
    progress = ProgressLines("decoding images", len(kinds))
    with ThreadPoolExecutor(workers) as pool:
        remaining, done = iter(kinds), 0
        for chunk in iter(lambda: list(islice(remaining, 16 * workers)), []):  # bounds what waits for its turn
            yield from zip(chunk, pool.map(read, chunk), strict=True)
            done += len(chunk)
            progress.done(done)
