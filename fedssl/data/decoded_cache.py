"""Decoded images that are kept on the disk: each file is decoded once, however many runs read it."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..storage import cannot_write, make_folder, write_atomically
from .error_text import printable
from .memory import readable_bytes
from .stored_images import StoredImages, open_stored_images

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
