"""Images as one array: read from many files, in memory or in a cache file that is read by row, and chosen by rows.

With their labels they are splits: the training, test and validation images that every kind of data is read into.
"""

import fcntl
import hashlib
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from rich.filesize import decimal as readable_bytes
from torch import Tensor

from ..errors import UserError
from ..run_folder.storage import make_folder, writing
from ..untrusted import printable
from .files import ARRAY_SUFFIX, listed, notify
from .image_files import BrokenImageError, ImageKind, image_kind, read_pixels, readable_kind, stored_values
from .image_kinds import usual_channels, usual_size
from .options import DataOptions
from .pixels import (
    VALUES_FOR_WINDOW,
    Window,
    is_by_channel,
    notify_of_constant,
    notify_of_copies,
    range_of_floats,
    require_pixels,
    window_of_percentiles,
    windows_to_set,
)

_CACHE_VERSION = 6  # to be raised when a file's pixels come to mean something else
_SHARE_OF_MEMORY = 0.25  # a holdout and the deal to the clients each copy the images
_FILES_FOR_RANGE, _FILES_FOR_WINDOW = 20, 100
_MOST_NAMED = 5
_ODD_SHARE = 0.1  # of the images that have another size than the rest: fewer are named, as they may be there by mistake
_FILES_AT_A_TIME = 16  # for each thread that decodes
_SECONDS_BETWEEN_LINES = 10.0  # of progress, on stderr
_Store = Callable[[NDArray[np.uint8]], Any]


class ChosenImages:
    """Some rows of uint8 images [m, C, H, W], used as a tensor of them: `images[rows]`, `len`, `split`, `shape`.

    They are copied, or read, when they are asked for: a client of one step need not copy all.
    """

    def __init__(self, images: "Tensor | _ImageFile", rows: Tensor):
        self._images, self._rows = images, rows

    @property
    def shape(self) -> torch.Size:
        """Return [n, C, H, W]."""
        return torch.Size((len(self._rows), *self._images.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Return the bytes that all images take in memory."""
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Tensor | slice | int) -> Tensor:
        """Return images: uint8 [m, C, H, W] by row numbers or a slice, [C, H, W] by one row number."""
        rows = self._rows[index]
        # of a batch of 50 small images, index_select takes a tenth of the time of indexing
        images = self._images.index_select(0, rows.reshape(-1))
        return images if rows.ndim else images[0]

    def split(self, count: int) -> Iterator[Tensor]:
        """Return all images, `count` at a time."""
        return (self[start : start + count] for start in range(0, len(self), count))


class StoredImages(ChosenImages):
    """Images of a file, see `open_stored_images`.

    Rows are read, not mapped: a limit on the address space holds, and a batch takes no more memory than itself. The
    file stays open, so that a run goes on if it is deleted. Reading raises a UserError if the file cannot be read.
    """

    def of_rows(self, index: Tensor | slice) -> "StoredImages":
        """Return the images of some rows, which are not read yet."""
        return StoredImages(self._images, self._rows[index])


#: images [n, C, H, W] in memory or in a file
Images: TypeAlias = Tensor | StoredImages | ChosenImages


def rows_in_place(images: Images, rows: Tensor) -> Images:
    """Return some of the images, none of which is read or copied yet."""
    return ChosenImages(images, rows) if isinstance(images, Tensor) else images_of_rows(images, rows)


def images_of_rows(images: Images, index: Tensor | slice) -> Images:
    """Return some of the images; those in a file stay there."""
    return images.of_rows(index) if isinstance(images, StoredImages) else images[index]


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """One split, as `Dataset` describes it."""

    images: Images
    labels: Tensor
    targets: Tensor | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def rows(self, index: Tensor) -> "LabelledImages":
        """Return the images and labels with the given row numbers, int64 [m]."""
        numbers = index.tolist()
        columns = {name: tuple(values[number] for number in numbers) for name, values in self.columns.items()}
        targets = None if self.targets is None else self.targets[index]
        return LabelledImages(images_of_rows(self.images, index), self.labels[index], targets, columns)


@dataclass(frozen=True, eq=False)
class Splits:
    """One dataset's splits, its classes and its window, as `Dataset` describes them."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    validation: LabelledImages | None = None
    window: Window | None = None


def unlabelled(images: Images, targets: Tensor | None = None) -> LabelledImages:
    """Return a split of images without classes."""
    return LabelledImages(images, torch.zeros(len(images), dtype=torch.int64), targets)


def open_stored_images(path: Path, image_shape: tuple[int, int, int], count: int) -> StoredImages:
    """Return the `count` images [C, H, W] of a file that holds nothing but their bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{printable(path)} cannot be opened: {error.strerror or error}") from error
    return StoredImages(_ImageFile(path, handle, (count, *image_shape)), torch.arange(count))


class _ImageFile:
    """A file of images [n, C, H, W] that stays open as long as anybody reads it, also another process that gets it."""

    def __init__(self, path: Path, handle: int, shape: tuple[int, ...]):
        self._path, self._handle, self.shape = path, handle, shape

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handle": DupFd(self._handle)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _handle=state["_handle"].detach())

    def __del__(self) -> None:
        os.close(self._handle)

    def index_select(self, dim: Literal[0], rows: Tensor) -> Tensor:
        """Read the images of some rows [m], as a tensor's method of this name copies them."""
        images = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8)
        for image, row in zip(images.numpy(), rows.tolist(), strict=True):
            target, done = memoryview(image).cast("B"), 0
            while done < len(target):
                try:
                    count = os.preadv(self._handle, [target[done:]], row * len(target) + done)
                except OSError as error:
                    raise UserError(f"{printable(self._path)} cannot be read: {error.strerror or error}") from error
                if count == 0:
                    raise UserError(
                        f"{printable(self._path)} has become shorter; delete it, so that it is written again"
                    )
                done += count
        return images


def available_memory() -> int:
    """Return the bytes that can still be allocated: the least of what machine, control group and `ulimit -v` leave."""
    # Not by psutil, which knows neither of the last two.
    page = os.sysconf("SC_PAGE_SIZE")
    limits = [os.sysconf("SC_PHYS_PAGES") * page]
    with suppress(OSError, KeyError):  # no Linux: what is installed
        fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        limits.append(soft_limit)
        with suppress(OSError):
            limits.append(soft_limit - int(_text("/proc/self/statm").split()[0]) * page)
    with suppress(OSError, ValueError, KeyError):  # no control group, or `max` for no limit
        limit, used = (int(_text(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
        statistics = dict(line.split() for line in _text("/sys/fs/cgroup/memory.stat").splitlines())
        limits.append(limit - used + int(statistics["inactive_file"]))  # cached files can be dropped
    return max(0, min(limits))


def _text(path: str) -> str:
    return Path(path).read_text(encoding="ascii")


def decode_images(files: Sequence[Path], options: DataOptions, height: int, width: int) -> tuple[Images, list[int]]:
    """Read image files, at least one, at one size in pixels, see `read_pixels`.

    What takes more than `options.memory_limit` is decoded into a file, once.

    Returns:
        uint8 [n, C, H, W], where C is `options.channels`, or else the number that most files have; and which of the
        files they are, ascending, which is all of them unless broken ones are skipped.

    Raises:
        UserError: files are broken, none is left, their channels differ, the window does not suit them, or the disk has
            no room.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of files that are read all the same or named as broken
        limit = _SHARE_OF_MEMORY * available_memory() if options.memory_limit is None else options.memory_limit * 1e9
        asked_for = "" if options.channels is None else f" {options.channels}"
        cache = _cache_path(files, f"{height} {width} {options.window}{asked_for}")
        if cached := _read_cache(cache, files, options, limit):
            return cached
        kinds, faults = _read_headers(files, options)
        options = options.model_copy(update={"window": _checked_window(files, kinds, options)})
        readable = {index: files[index] for index in kinds}
        shape = _channels_of(files, kinds, options), height, width
        needed = len(readable) * math.prod(shape)
        if needed <= limit:
            images = torch.empty((len(readable), *shape), dtype=torch.uint8)
            rows = iter(images.numpy())
            kept = _decode(readable, shape, options, faults, lambda pixels: np.copyto(next(rows), pixels))
            report_broken(files, faults, options.broken)
            return images[: len(kept)], kept
        notify(f"decoding {len(readable):,} images once, into {printable(cache)} ({readable_bytes(needed)})")
        with _new_file(cache, needed) as file:
            kept = _decode(readable, shape, options, faults, lambda pixels: file.write(pixels.tobytes()))
            report_broken(files, faults, options.broken)
        described = json.dumps({"shape": shape, "kept": kept, "faults": faults}).encode()
        with _new_file(cache.with_suffix(".json"), len(described)) as file:  # another process may write it too
            file.write(described)
        return open_stored_images(cache, shape, len(kept)), kept


def measured_window(files: Sequence[Path], training: int, options: DataOptions) -> Window | None:
    """Return the window of the options; that of percentiles as the numbers of the first files, the training images."""
    if options.window != "percentiles":
        return options.window
    kinds = [readable_kind(file, options.channels) for file in files]
    channels = options.channels or usual_channels([kind for kind in kinds if kind])
    needing = [file for file, kind in zip(files[:training], kinds, strict=False) if kind and kind.deep]
    chosen = needing[:: math.ceil(len(needing) / _FILES_FOR_WINDOW) or 1]
    least = max(1, VALUES_FOR_WINDOW // max(1, len(chosen)))
    parts = []
    for _, values in _values_of(chosen, options.channels):
        part = values[:: math.ceil(len(values) / least)]
        # grey and colours become each other
        parts.append(part.reshape(-1, 1).repeat(channels, 1) if {part.shape[1], channels} == {1, 3} else part)
    fitting = [part for part in parts if part.shape[1] == channels]  # decoding refuses the others
    parts = fitting or [part.reshape(-1, 1) for part in parts]
    return window_of_percentiles(np.concatenate(parts).T) if parts else None


def _cache_path(files: Sequence[Path], decoded_as: str) -> Path:
    """Return the path of the cache, a file of pixels and nothing else. NAME.json, written last, makes it valid.

    Its name is a digest of what decides the pixels: the files' names, sizes and times of change, and the decoding.
    """
    digest = hashlib.sha256(f"{_CACHE_VERSION} {PIL.__version__} {decoded_as}".encode())
    for file in files:
        try:
            status = os.stat(file)
            state = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            state = "missing"
        digest.update(os.fsencode(os.path.abspath(file)) + b"\0" + state.encode() + b"\0")
    folder = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "fedssl", "decoded")
    return folder / f"{digest.hexdigest()[:32]}.images"


def _read_cache(
    cache: Path, files: Sequence[Path], options: DataOptions, limit: float
) -> tuple[Images, list[int]] | None:
    """Return what `decode_images` gave an earlier run, or None; what it could not read is named again.

    What takes no more than `limit` bytes is held in memory by now.
    """
    try:
        stored = json.loads(cache.with_suffix(".json").read_text(encoding="utf-8"))
        channels, height, width = stored["shape"]
        kept, faults = stored["kept"], {int(index): reason for index, reason in stored["faults"].items()}
        size = len(kept) * channels * height * width
        if size <= limit or size != cache.stat().st_size:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    report_broken(files, faults, options.broken)
    return open_stored_images(cache, (channels, height, width), len(kept)), kept


@contextmanager
def _new_file(path: Path, size: int) -> Iterator[IO[bytes]]:
    """Open a temporary file of at most `size` bytes, which becomes `path` if nothing fails and else is removed.

    Its process locks it. Those that nobody locks are left from processes that were killed, and are removed.
    """
    make_folder(path.parent)
    for old in path.parent.glob("*.partial"):
        with suppress(OSError), open(old, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # an empty one may be about to be locked
                old.unlink()
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise UserError(
            f"the decoded images need {readable_bytes(size)} in {printable(path.parent)}, where "
            f"{readable_bytes(free)} are free; free some space, let XDG_CACHE_HOME name a folder on another disk, "
            "or raise data.memory_limit"
        )
    with writing(path), ExitStack() as stack:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            temporary = Path(file.name)
            stack.callback(temporary.unlink, missing_ok=True)
            with suppress(OSError):  # of file systems without locks, where none is removed
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def report_broken(files: Sequence[Path], faults: dict[int, str], broken: Literal["refuse", "skip"]) -> None:
    """Name the files that cannot be read, by index with the reason; raise a UserError unless they may be skipped."""
    if not faults:
        return
    reasons = [(printable(files[index]), reason) for index, reason in sorted(faults.items())]
    which = f"{reasons[0][0]} cannot be read as an image ({reasons[0][1]})"
    if len(reasons) > 1:
        named = listed([f"{file} ({reason})" for file, reason in reasons], _MOST_NAMED)
        which = f"{len(faults)} of {len(files)} files cannot be read as images: {named}"
    if len(faults) == len(files):
        raise UserError(f"{which}; no image is left: mend what the brackets name, or set data.path to another folder")
    if broken == "refuse":
        raise UserError(f"{which}; repair or remove {'it' if len(faults) == 1 else 'them'}, or set data.broken=skip")
    notify(f"{which}; skipped")


def _channels_of(files: Sequence[Path], kinds: dict[int, ImageKind], options: DataOptions) -> int:
    """Return the number of channels of all images; a UserError names two files whose numbers do not go together."""
    first: dict[int, Path] = {}
    for index, kind in kinds.items():
        first.setdefault(kind.channels, files[index])
    channels = options.channels or usual_channels(kinds.values())
    if options.channels is None and len(first) > 1 and not first.keys() <= {1, 3}:
        (count, file), (other_count, other) = list(first.items())[:2]
        raise UserError(
            f"{printable(file)} has {count} channels and {printable(other)} {other_count}; expected one number in a "
            "folder: keep the files of one kind, or set data.channels to the number to read, with data.broken=skip"
        )
    others = [str(files[index]) for index, kind in kinds.items() if kind.channels != channels]
    if others and channels in (1, 3):
        what, into = ("in colour", "grey") if channels == 1 else ("grey", "three equal channels")
        why = "data.channels or the training images say" if options.channels else "most images are"
        names = listed(others, _MOST_NAMED)
        notify(f"{len(others):,} of {len(kinds):,} images are {what} and become {into}, as {why}: {names}")
    window, deep = options.window, any(kind.deep for kind in kinds.values())
    if is_by_channel(window) and len(window) != channels and deep:
        raise UserError(
            f"data.window has {len(window)} pairs, but the images have {channels} channels; give one [LOW,HIGH] for "
            "all, or one for each"
        )
    return channels


def _read_headers(files: Sequence[Path], options: DataOptions) -> tuple[dict[int, ImageKind], dict[int, str]]:
    """Return the kinds of the files by index, and the reasons of those that cannot be read."""
    kinds: dict[int, ImageKind] = {}
    faults: dict[int, str] = {}
    for index, file in enumerate(files):
        try:
            kinds[index] = image_kind(file, options.channels)
        except BrokenImageError as error:
            faults[index] = str(error)
    usual = usual_size(kinds.values())
    odd = [f"{files[index]} ({kind.size[0]} x {kind.size[1]})" for index, kind in kinds.items() if kind.size != usual]
    if usual is not None and 0 < len(odd) <= _ODD_SHARE * len(kinds):
        notify(
            f"{len(odd):,} of {len(kinds):,} images are not of {usual[0]} x {usual[1]} pixels, as the others are: "
            f"{listed(odd, _MOST_NAMED)}; they are cropped and resized: leave out what does not belong to them"
        )
    alpha = [str(files[index]) for index, kind in kinds.items() if kind.alpha]
    if alpha:
        notify(f"transparency is left out of {len(alpha):,} of {len(kinds):,} images: {listed(alpha, _MOST_NAMED)}")
    several = [str(files[index]) for index, kind in kinds.items() if kind.frames > 1]
    if several:
        what = "1 file holds" if len(several) == 1 else f"{len(several):,} files hold"
        notify(
            f"{what} several images, of which the first is used: {listed(several, _MOST_NAMED)}; where the pages of a "
            "TIFF are its channels, set data.channels to their number"
        )
    return kinds, faults


def range_of_float_files(files: Sequence[Path], channels: int | None) -> Window | None:
    """Return the range of .npy files of floats, as that of arrays in an .npz file; None where any needs a window.

    All of their values are read once more for it.
    """
    if any(file.suffix.lower() != ARRAY_SUFFIX for file in files):
        return None
    floats = {file: kind for file in files if (kind := readable_kind(file, channels)) and kind.deep}
    if not floats or any(kind.type_range for kind in floats.values()):
        return None

    def arrays() -> Iterator[tuple[str, NDArray[Any]]]:
        for name, values in _values_of(list(floats), channels):
            require_pixels(name, values[None], None)
            yield name, values

    return range_of_floats(arrays())


def _values_of(files: Sequence[Path], channels: int | None) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the names and the values of the files that can be read; decoding names the others."""
    for file in files:
        with suppress(BrokenImageError):
            yield printable(file), stored_values(file, channels)


def _checked_window(files: Sequence[Path], kinds: dict[int, ImageKind], options: DataOptions) -> Window | None:
    """Return the window; raise a UserError if files have more than 8 bits a channel, and it does not say what to do."""
    gray = [index for index, kind in kinds.items() if kind.deep]
    window = options.window or range_of_float_files([files[index] for index in gray], options.channels)
    if gray and window is None:
        files_of_range = [files[index] for index in gray[:_FILES_FOR_RANGE]]
        ranges = [(name, values.min(), values.max()) for name, values in _values_of(files_of_range, options.channels)]
        if not ranges:
            return "full"  # decoding says what is wrong with them
        first, low, high = ranges[0][0], min(one[1] for one in ranges), max(one[2] for one in ranges)
        integers = [kinds[index].type_range is not None for index in gray]
        own = ", or data.window=file (what each DICOM file names)" if kinds[gray[0]].has_window else ""
        raise UserError(
            f"{first} has {'pixels of more than 8 bits' if any(integers) else 'floats'}, as {len(gray)} of "
            f"{len(files)} files have (values {low:g} to {high:g} in the first {min(len(gray), _FILES_FOR_RANGE)}); "
            f"set {windows_to_set(low, high, all(integers))}{own}"
        )
    return window


def _decode(
    readable: dict[int, Path], shape: tuple[int, int, int], options: DataOptions, faults: dict[int, str], store: _Store
) -> list[int]:
    """Give the pixels of the files to `store` in order, and return the indices of those that can be read.

    Add the reasons of the others to `faults`. Pillow decodes outside Python's lock, so threads do it. Each takes
    several files at a time: handing over small ones one by one takes longer than decoding them.
    """
    channels, height, width = shape

    def read(index: int) -> NDArray[np.uint8] | str:
        try:
            return read_pixels(readable[index], height, width, channels, options.window, options.channels)
        except BrokenImageError as error:
            return str(error)

    def read_all(indices: list[int]) -> list[NDArray[np.uint8] | str]:
        return [read(index) for index in indices]

    workers = os.cpu_count() or 1
    kept: list[int] = []
    hashes: list[int] = []
    contrasts: list[int] = []
    last_line = time.monotonic()
    indices = list(readable)
    with ThreadPoolExecutor(workers) as pool:
        # a part for each thread at a time, which bounds what waits for its turn
        for first in range(0, len(indices), _FILES_AT_A_TIME * workers):
            chunk = indices[first : first + _FILES_AT_A_TIME * workers]
            parts = [chunk[start : start + _FILES_AT_A_TIME] for start in range(0, len(chunk), _FILES_AT_A_TIME)]
            for index, pixels in zip(chunk, chain.from_iterable(pool.map(read_all, parts)), strict=True):
                if isinstance(pixels, str):
                    faults[index] = pixels
                else:
                    store(pixels)
                    kept.append(index)
                    hashes.append(hash(pixels.tobytes()))
                    contrasts.append(int(np.ptp(pixels)))
            if time.monotonic() - last_line >= _SECONDS_BETWEEN_LINES:
                last_line, done = time.monotonic(), first + len(chunk)
                print(f"fedssl: decoding images: {done:,} of {len(indices):,}", file=sys.stderr, flush=True)
    if kept:
        mixed = len({file.is_absolute() for file in readable.values()}) > 1  # as data.path and data.more_paths may be
        folder = os.path.commonpath([file.absolute() if mixed else file for file in readable.values()])
        notify_of_constant(f"the images in {printable(folder)}", contrasts)
        notify_of_copies(hashes, lambda row: str(readable[kept[row]]))
    return kept
