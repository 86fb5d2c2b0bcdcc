"""A summary of a data set, from names and headers alone: no image is decoded, and torch is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from ..untrusted import expand_home, printable
from .files import IMAGE_SUFFIXES, kind_of, list_files, remedy, split_folders
from .image_kinds import usual_channels, usual_size
from .options import SOURCES, DataOptions

_SAMPLED = 32  # image files whose headers are read
_IMAGE_KEYS = ("x_train", "train_images", "x")
_LABEL_KEYS = ("y_train", "train_labels")

# Of files of several sizes, the images are brought to the largest of these that is not above their median side.
_SIZES = (32, 64, 96, 128)
_LEAST_SIDE = 4  # of data.image_size


@dataclass(frozen=True)
class DataSummary:
    """A data set's training images.

    Attributes:
        images: how many there are after data.public_holdout and train_limit; 0 where that is unknown. Those of
            data.validation_fraction count, so that a sweep's trials have the settings of the runs that follow them.
        channels: 1 where all are grey, 3 in colour, or another number.
        side: their shorter side in pixels; of image files, the side to which they are brought.
        labelled: whether each has a class.
        from_files: whether they are image files, which have to be brought to one size.
    """

    images: int
    channels: int
    side: int
    labelled: bool
    from_files: bool = False


def summarise(data: Mapping[str, Any]) -> DataSummary | None:
    """Summarise the data set that a recipe's `data` names, before the recipe is checked.

    Return None where `data` is not what a recipe may have: the recipe's checks say why.
    """
    try:
        options = DataOptions.model_validate(dict(data))
    except ValidationError:
        return None
    if options.image_shape is not None:  # of the sites' images, whose number nobody else knows
        return DataSummary(0, options.image_shape[0], min(options.image_shape[1:]), False)
    source = SOURCES[options.name]
    if source.shape is not None:
        known = DataSummary(source.images, source.shape[0], min(source.shape[1:]), True)
    else:
        assert options.path is not None
        path = expand_home(options.path)
        kind = kind_of(path)
        if kind == "missing":
            raise UserError(f"data.path: there is no file or folder {printable(path)}")
        if kind != ("folder" if source.image_files else "file"):
            return None
        known = _of_files(path, options) if source.image_files else _of_npz(path, options.channels)
    images = max(0, known.images - options.public_holdout)
    images = min(images, options.train_limit or images)
    return replace(known, images=images, side=options.image_size or known.side)


def _of_npz(path: Path, channels: int | None) -> DataSummary:
    from .npz import NpzArchive
    from .pixels import channel_axis

    with NpzArchive(path) as archive:
        names = archive.names
        chosen = next((name for name in _IMAGE_KEYS if name in names), names[0] if len(names) == 1 else None)
        if chosen is None:
            raise UserError(f"data.path: {path} holds none of the arrays {', '.join(_IMAGE_KEYS)}")
        shape = archive.shape(chosen)
        labels = [archive.shape(name) for name in _LABEL_KEYS if name in names]
    axis = None if len(shape) == 3 else channel_axis(shape, f"data.path: {chosen} in {path}", channels)
    stored = 1 if axis is None else shape[axis]
    side = min(size for number, size in enumerate(shape) if number not in (0, axis))
    one_class = any(one[1:] in ((), (1,)) for one in labels)  # and not several labels an image
    return DataSummary(shape[0], channels or stored, side, one_class)


def _of_files(path: Path, options: DataOptions) -> DataSummary:
    """Read the headers of some image files, evenly spread over the folder."""
    from .image_files import readable_kind

    files, others = list_files(path, options.follow_links)
    for more in options.more_paths:
        folder = expand_home(more)
        files += list_files(folder, options.follow_links)[0] if kind_of(folder) == "folder" else []
    splits = split_folders(path)
    if len(splits) == 2:
        files = [file for file in files if file.is_relative_to(splits[0])]
    if not files:
        raise UserError(
            f"data.path: {path} holds no image; images end with {', '.join(IMAGE_SUFFIXES)}{remedy(others)}"
        )
    sampled = files[:: -(-len(files) // _SAMPLED)]
    # loading the data names the files that cannot be read
    kinds = [kind for file in sampled if (kind := readable_kind(file, options.channels))]
    usual = usual_size(kinds)
    shorter = sorted(min(kind.size) for kind in kinds) or [_SIZES[-1]]
    side = max((size for size in _SIZES if size <= shorter[len(shorter) // 2]), default=_SIZES[0])
    if usual is not None and _LEAST_SIDE <= usual[0] == usual[1] <= _SIZES[-1]:
        side = usual[0]
    labelled = options.name == "folder" or (options.labels is not None and options.label_column is not None)
    count = len(files)
    if isinstance(options.labels, Path) and kind_of(table := expand_home(options.labels)) == "file":
        count = min(count, max(1, len(table.read_bytes().splitlines()) - 1))  # without the header
    if labelled and len(splits) < 2:
        count -= round(count * options.test_fraction)  # those become the test set
    return DataSummary(count, options.channels or usual_channels(kinds), side, labelled, from_files=True)
