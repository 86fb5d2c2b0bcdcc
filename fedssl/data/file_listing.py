"""Which files of a folder are images, and which are left out."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .error_text import listed, printable
from .image_files import IMAGE_SUFFIXES
from .notices import notify

# What programs put beside images: macOS's archives, Synology's thumbnails, Windows's.
_FOLDERS_OF_PROGRAMS = ("__MACOSX", "@eaDir")
_FILES_OF_PROGRAMS = ("Thumbs.db", "desktop.ini")
_MOST_NAMED = 5


@dataclass(frozen=True)
class FileListing:
    """The files under a folder, in a fixed order.

    Attributes:
        images: those whose names end as an image's.
        others: those that are left out and that the user may have meant; programs' own and hidden files are not here.
    """

    images: list[Path]
    others: list[Path]


def list_files(folder: Path, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> FileListing:
    """List a folder and the folders in it; links are followed, also to folders, and hidden names are left out.

    Only regular files count: opening a pipe would wait for ever.

    Raises:
        UserError: a folder cannot be read.
    """
    images: list[Path] = []
    others: list[Path] = []
    for inner, names in sorted(_walk(folder)):
        for name in sorted(names):
            file = Path(inner, name)
            is_image = name.lower().endswith(suffixes) and file.is_file()
            (images if is_image else others).append(file)
    return FileListing(images, others)


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, sorted by name, without hidden ones and those of programs.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return sorted(
            (entry for entry in folder.iterdir() if not _is_of_a_program(entry.name) and entry.is_dir()),
            key=lambda entry: entry.name,
        )
    except OSError as error:
        raise UserError(f"{printable(folder)} cannot be read: {error.strerror or error}") from error


def notify_of_left_out(others: list[Path], root: Path, expected: str = "") -> None:
    """Name the first of the files that are left out, and say how many there are.

    Args:
        others: the files.
        root: the folder that the user named; the files' names are shown as they are in it.
        expected: where an image must be so that it counts, to follow "must be".
    """
    if others:
        names = [os.path.relpath(file, root) for file in others]
        kinds = ", ".join(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
        what = "1 file is" if len(others) == 1 else f"{len(others):,} files are"
        where = f", and each must be {expected}" if expected else ""
        notify(f"{what} left out of {printable(root)}: {listed(names, _MOST_NAMED)}; images end with {kinds}{where}")


def _walk(folder: Path) -> list[tuple[str, list[str]]]:
    """Each folder with the names of its files; a folder that links lead to twice is listed once."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{printable(error.filename)} cannot be read: {error.strerror or error}") from error

    listing: list[tuple[str, list[str]]] = []
    visited: set[str] = set()
    for inner, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(inner)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not _is_of_a_program(name))
        listing.append((inner, [name for name in names if not _is_of_a_program(name)]))
    return listing


def _is_of_a_program(name: str) -> bool:
    return name.startswith(".") or name in _FOLDERS_OF_PROGRAMS or name in _FILES_OF_PROGRAMS
