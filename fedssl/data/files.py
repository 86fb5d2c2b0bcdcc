"""The paths that the user gives: what is there, which files are images, and how messages name them."""

import logging
import os
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ..errors import UserError
from ..untrusted import listed, printable

_TIFF_BEGINS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
DICOM_SUFFIXES = (".ima", ".dcm", ".dicom")

#: the names that a file of images may end with, in small letters
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif"),
    *(".ppm", ".pgm", ".pbm", ".pnm", *DICOM_SUFFIXES),
)

#: of numpy's arrays, each of one image, which are read where a folder holds no other image file
ARRAY_SUFFIX = ".npy"

# What programs put beside images: macOS's archives, Synology's thumbnails, Windows's.
_NAMES_OF_PROGRAMS = ("__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini")

# Folders that hold the results of runs: those of loggers, and what lies together in a run, a table or an encoder.
_NAMES_OF_LOGGERS = ("mlruns", "mlartifacts", "wandb")
_RESULTS = (
    ("recipe.yaml", "metrics.csv"),
    ("recipe.yaml", "checkpoints"),
    ("table.yaml", "table.md"),
    ("config.json", "model.safetensors"),
)

# What makes images of other files, by how their names end; the first ending counts, so that .nii.gz is no archive.
_REMEDIES = {
    (".nii", ".nii.gz", ".mha", ".mhd", ".nrrd"): "save each slice of a volume as a TIFF or .npy file, with SimpleITK",
    (".svs", ".ndpi", ".mrxs", ".czi", ".vsi"): "cut slides into PNG tiles, with vips dzsave",
    (".heic", ".heif", ".avif", ".jxl", ".jp2"): "convert photos with ImageMagick: magick mogrify -format png PHOTOS",
    (".mp4", ".mov", ".avi", ".mkv", ".mpg"): "save the frames of a video: ffmpeg -i VIDEO frames/%06d.png",
    (".npz",): "name the .npz file in place of its folder, in a recipe with data.name=npz",
    (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar"): "unpack archives",
    (".h5", ".hdf5"): "read arrays with h5py and save them by numpy.savez_compressed, for data.name=npz",
    (".parquet", ".arrow", ".tfrecord"): "save the image of each row as a file, and the labels as a CSV file",
}

_MASKS = ("mask", "masks", "label", "labels", "annotation", "annotations", "segmentation", "segmentations")
_IMAGES = ("image", "images", "img", "imgs")

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
}

_LOGGER = logging.getLogger("fedssl.data")


def notify(text: str) -> None:
    """Show the user one line of text."""
    _LOGGER.warning("fedssl: %s", text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters; its type where the message is empty."""
    lines = str(error).splitlines()
    return printable(lines[0][:300]) if lines else type(error).__name__


def remedy(paths: Iterable[Path]) -> str:
    """Return what makes images of files that are none, each after a semicolon; empty where their kinds are unknown."""
    kinds = {next((ends for ends in _REMEDIES if path.name.lower().endswith(ends)), None) for path in paths}
    return "".join(f"; {text}" for ends, text in _REMEDIES.items() if ends in kinds)


def composed(text: str) -> str:
    """Return a text with each accent and its letter as one character (NFC): macOS writes two in the names of files."""
    return unicodedata.normalize("NFC", text)


def kind_of(path: Path) -> Literal["file", "folder", "missing", "special"]:
    """Return what is there; `special` is a pipe, a device or a socket, and opening it could wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        raise UserError(f"{printable(path)} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "special"


def is_dicom(file: Path) -> bool:
    """Return True if a file's name ends as a DICOM file's, or it begins as one: scanners write names without an ending.

    A DICOMDIR is none: it lists the files beside it.
    """
    if file.name.upper() == "DICOMDIR":
        return False
    if file.name.lower().endswith(DICOM_SUFFIXES):
        return True
    return first_bytes(file, 132)[128:] == b"DICM"


def is_tiff(file: Path) -> bool:
    """Return True if a file begins as a TIFF, also one of more than 4 GB."""
    return first_bytes(file, 4) in _TIFF_BEGINS


def first_bytes(file: Path, count: int) -> bytes:
    """Return the bytes with which a file begins; none where it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return stream.read(count)
    except OSError:
        return b""


def list_files(folder: Path, follow_links: bool) -> tuple[list[Path], list[Path]]:
    """List the files in a folder and the folders in it, without hidden ones; links are followed, also to folders.

    Only regular files count: opening a pipe would wait for ever. A folder that links lead to twice is listed once. A
    folder of results, such as a run's with its pictures, is no data: it counts as one of the others.

    Args:
        folder: the folder, which may be a link itself.
        follow_links: follow links out of the folder, too.

    Returns:
        The files whose names end as an image's or that begin as a DICOM file, and the others, in a fixed order.

    Raises:
        UserError: a folder cannot be read, or a link leads out of `folder` and is not to be followed.
    """
    root = os.path.realpath(folder)

    def refuse(error: OSError) -> None:
        raise UserError(f"{printable(error.filename)} cannot be read: {error.strerror or error}") from error

    files: list[tuple[str, str]] = []
    others: list[Path] = []
    visited: set[str] = set()
    for inner, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(inner)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        found = sorted(name for name in folders if not _is_ignored(name))
        folders[:] = [name for name in found if not _holds_results(Path(inner, name))]
        others += [Path(inner, name) for name in found if name not in folders]
        if not (follow_links or Path(real).is_relative_to(root)):
            raise _leads_out(inner, real, folder)
        files += [(inner, name) for name in names if not _is_ignored(name)]
    images: list[Path] = []
    for inner, name in sorted(files):
        file = Path(inner, name)
        is_image = file.is_file() and (name.lower().endswith(IMAGE_SUFFIXES) or is_dicom(file))
        (images if is_image else others).append(file)
    if not images:  # beside image files, arrays are labels or features
        images = [file for file in others if file.suffix.lower() == ARRAY_SUFFIX and file.is_file()]
        arrays = set(images)
        others = [file for file in others if file not in arrays]
    for file in [] if follow_links else images:  # other files are not read
        if file.is_symlink() and not (real_file := Path(os.path.realpath(file))).is_relative_to(root):
            raise _leads_out(str(file), str(real_file), folder)
    return images, others


def _leads_out(link: str, target: str, folder: Path) -> UserError:
    return UserError(
        f"{printable(link)} is a link out of {printable(folder)}, to {printable(target)}: whoever made the folder may "
        "mean files of yours by it. Put a copy in its place, or set data.follow_links=true (fedssl embed: "
        "--follow-links) if you want it to be read"
    )


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones and those of programs."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry) for entry in entries if not _is_ignored(entry.name) and entry.is_dir())
    except OSError as error:
        raise UserError(f"{printable(folder)} cannot be read: {error.strerror or error}") from error


def split_folders(folder: Path) -> list[Path]:
    """Return the folders of the training and the test images in a folder, or the one that is there, or none.

    They are named in any usual way, such as Train/ and testing/. Where there is no test/, val/ stands for it.
    """
    found: dict[str, Path] = {}
    for inner in subfolders(folder):
        split = _SPLITS.get(inner.name.lower())
        if split in found:
            raise UserError(
                f"{printable(folder)} holds {printable(found[split].name)}/ and {printable(inner.name)}/, which both "
                f"mean its {split} images; put them into one folder, or rename one"
            )
        if split is not None:
            found[split] = inner
    return [found[split] for split in ("train", "test" if "test" in found else "val") if split in found]


def notify_of_left_out(others: list[Path], root: Path, expected: str = "") -> None:
    """Name the first files that are left out of `root`, and their number; `expected` is where an image must be."""
    results = [os.path.relpath(file, root) for file in others if file.is_dir()]
    if results:
        notify(f"results of runs are left out of {printable(root)}: {listed(results, most=5)}")
    others = [file for file in others if not file.is_dir()]
    if others:
        names = [os.path.relpath(file, root) for file in others]
        kinds = ", ".join(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
        what = "1 file is" if len(others) == 1 else f"{len(others):,} files are"
        where = f", and each must be {expected}" if expected else ""
        shown = listed(names, most=5)
        notify(f"{what} left out of {printable(root)}: {shown}; images end with {kinds}{where}{remedy(others)}")


def notify_of_masks(images: Iterable[Path], root: Path) -> None:
    """Name the folders of masks, such as masks/ beside images/, whose files are among the images of `root`."""
    folders = {folder for image in images for folder in image.relative_to(root).parents}
    beside = {folder.parent for folder in folders if folder.name.lower() in _IMAGES}
    masks = sorted(str(folder) for folder in folders if folder.name.lower() in _MASKS and folder.parent in beside)
    if masks:
        notify(
            f"{listed(masks)} in {printable(root)} has the name of masks, and its files count as images: move it, or "
            "set data.path to the folder of the images"
        )


def _holds_results(folder: Path) -> bool:
    return folder.name in _NAMES_OF_LOGGERS or any(
        all((folder / name).exists() for name in names) for names in _RESULTS
    )


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in _NAMES_OF_PROGRAMS
