"""A run's images: training and test images with their labels, and the public images of the alignment."""

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, explained
from ..untrusted import expand_home, printable
from .files import composed, kind_of, list_files, listed, notify, notify_of_left_out
from .image_kinds import SMALLEST_SIDE
from .npz import images_in
from .options import SOURCES, DataOptions
from .pixels import Window, channels_first, resize
from .stored_images import Images, LabelledImages, Splits, decode_images, images_of_rows, unlabelled

_MEASURED_TRAINING_IMAGES = 2000
_PUBLIC_KEYS = ("x", "x_train", "train_images")
_MISSING = ("nan", "na", "n/a", "<na>", "null", "none", "nil", "")  # what programs write for a missing label

# One random stream per purpose, so that (for instance) a public_limit does not change the training images.
_HOLDOUT_STREAM, _TRAIN_STREAM, _TEST_STREAM, _PUBLIC_STREAM, _VALIDATION_STREAM = range(1, 6)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, test and public images of one dataset, on the CPU.

    Attributes:
        train_images: uint8 [n, C, H, W], C is 1 to 32; in memory, or in a file where they are larger than the memory.
        train_labels: int64 [n], 0 to len(class_names) - 1; all 0 without labels.
        test_images, test_labels: the same for the test set, with the same C, H and W; without labels there may be none.
        class_names: a name for each label; empty for a dataset without labels.
        public_images: uint8 [L, C, H, W] without labels, Hetero-SSFL's representation alignment data; or None.
        validation_images, validation_labels: a file's official validation split (MedMNIST's), for fine-tuning alone.
        train_targets, test_targets: 0 or 1, uint8 [n, labels], where an image has several labels instead of one class
            (ChestMNIST). They are for evaluation: for all else such images are without labels.
        columns: further values of each training image, such as its hospital, by the name of a table's column.
        window: what brought pixels of more than 8 bits to 8 bits, with numbers in place of `percentiles`.
    """

    name: str
    train_images: Images
    train_labels: Tensor
    test_images: Images
    test_labels: Tensor
    class_names: tuple[str, ...]
    public_images: Tensor | None
    validation_images: Images | None = None
    validation_labels: Tensor | None = None
    train_targets: Tensor | None = None
    test_targets: Tensor | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    window: Window | None = None

    @property
    def labelled(self) -> bool:
        """Return True if each image has a class. Without classes nothing is measured or dealt by class."""
        return bool(self.class_names)

    @property
    def counted_as(self) -> tuple[str, ...]:
        """Return the names of a partition's counts: the classes, or `images` alone where there are no labels."""
        return self.class_names or ("images",)

    @property
    def measured_images(self) -> Images:
        """Return the images to measure representations on: the test images, or some training images without those.

        A server without data (`data.name=none`) has neither. The choice depends on nothing but the images' number, so
        that figures of different seeds compare.
        """
        if len(self.test_images) or not len(self.train_images):
            return self.test_images
        count = min(_MEASURED_TRAINING_IMAGES, len(self.train_images))
        return images_of_rows(self.train_images, torch.arange(count) * len(self.train_images) // count)


def load_dataset(options: DataOptions, seed: int) -> Dataset:
    """Read the dataset that `options` name; everything random (holdout, limits) follows from `seed` >= 0.

    The test images never depend on the seed, so that figures of different seeds compare.
    """
    load: Callable[[DataOptions], Splits] = pkgutil.resolve_name(f"{__package__}.{SOURCES[options.name].loader}")
    splits = load(options)
    _tell_of_labels(splits)
    if options.window == "percentiles":
        options = options.model_copy(update={"window": splits.window})
    train, test = (_resized(split, options.image_size) for split in (splits.train, splits.test))
    validation = None if splits.validation is None else _resized(splits.validation, options.image_size)
    _require_usable_shapes(train, test=test, validation=validation)

    if options.validation_fraction > 0:
        test, train = _draw(train, math.ceil(options.validation_fraction * len(train.labels)), 0, _VALIDATION_STREAM)

    public_images = None
    if options.public_path is not None:
        public_images = _load_public_images(options, train.images.shape[1:])
    elif options.public_holdout > 0:
        count, total = options.public_holdout, len(train.labels)
        if count >= total:
            raise UserError(
                f"data.public_holdout={count} leaves no training image of {total}; lower it to at most {total - 1}"
            )
        held_out, train = _draw(train, count, seed, _HOLDOUT_STREAM)
        public_images = held_out.images[:]

    if options.train_limit is not None:
        train = balanced_subset(train, options.train_limit, seed, _TRAIN_STREAM)
    if options.test_limit is not None:
        test = balanced_subset(test, options.test_limit, 0, _TEST_STREAM)
    if options.public_limit is not None and public_images is not None:
        order = torch.from_numpy(np.random.default_rng([seed, _PUBLIC_STREAM]).permutation(len(public_images)))
        public_images = public_images[order[: options.public_limit].sort().values]

    return Dataset(
        name=options.name,
        train_images=train.images,
        train_labels=train.labels,
        test_images=test.images,
        test_labels=test.labels,
        class_names=tuple(map(composed, splits.class_names)),
        public_images=public_images,
        validation_images=None if validation is None else validation.images,
        validation_labels=None if validation is None else validation.labels,
        train_targets=train.targets,
        test_targets=test.targets,
        columns=train.columns,
        window=options.window,
    )


def load_digits(options: DataOptions) -> Splits:
    """Return 1,797 gray digits of 8x8 pixels; a fixed, stratified fifth of them is the test set."""
    from sklearn.datasets import load_digits as load_bundle
    from sklearn.model_selection import train_test_split

    bundle = load_bundle()
    pixels = np.rint(bundle.images * (255 / 16)).astype(np.uint8)[:, None]
    classes = bundle.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(classes)), test_size=0.2, stratify=classes, random_state=0)
    # Rows are taken before torch sees the array: it would give the one channel a stride with which convolutions round
    # differently, in the last digits of a float.
    train_images, test_images = (
        LabelledImages(torch.from_numpy(pixels[rows]), torch.from_numpy(classes[rows]))
        for rows in (np.sort(train), np.sort(test))
    )
    return Splits(train_images, test_images, tuple(str(name) for name in bundle.target_names))


def load_torchvision_set(options: DataOptions) -> Splits:
    """Read a set of torchvision from `options.path`, by default ~/.cache/fedssl."""
    from torchvision import datasets

    name, source = options.name, SOURCES[options.name]
    root = expand_home(options.path or Path("~/.cache/fedssl"))
    assert source.torchvision is not None
    read = getattr(datasets, source.torchvision)
    problem = f"could not be downloaded to {root}" if options.download else f"is not complete under {root}"
    with explained(
        f"{name} {problem}", "; set data.download=true to fetch it, or data.path to the folder that holds it"
    ):
        train, test = (read(root, train=train, download=options.download) for train in (True, False))

    def to_images(split: Any) -> LabelledImages:
        return LabelledImages(channels_first(np.asarray(split.data), name), torch.as_tensor(split.targets).long())

    return Splits(to_images(train), to_images(test), tuple(train.classes))


def no_images(options: DataOptions) -> Splits:
    """Return splits without images, of the shape and the classes that the sites' images have."""
    assert options.image_shape is not None
    nothing = unlabelled(torch.empty((0, *options.image_shape), dtype=torch.uint8))
    return Splits(nothing, nothing, tuple(options.class_names))


def _tell_of_labels(splits: Splits) -> None:
    """Tell of classes that may be no class, the same as another or without images, and of splits of one class."""
    names, targets = splits.class_names, [part.targets for part in (splits.train, splits.test)]
    missing = [name for name in names if name.strip().lower() in _MISSING]
    if missing:
        notify(f"{listed(missing)} counts as a class: leave such images out where it says that a label is missing")
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(" ".join(name.split()).casefold(), []).append(repr(name))
    twins = [" and ".join(same) for same in alike.values() if len(same) > 1]
    if twins:
        notify(f"{listed(twins)} differ in capitals or spaces alone and are several classes: write them alike if not")
    train, test = (set(part.labels.tolist()) for part in (splits.train, splits.test))
    empty = [name for number, name in enumerate(names) if train and number not in train]
    if empty:
        notify(f"no training image is of the class {listed(empty)}: number classes 0, 1, 2, ... if it is left out")
    single = [what for what, found in (("training", train), ("test", test)) if names and len(found) == 1]
    if single:
        notify(f"all {' and all '.join(single)} images are of one class, so that no accuracy and no AUROC is measured")
    if all(rows is not None and bool((rows.sum(1) == 1).all()) for rows in targets):
        notify("each image has exactly one of several labels: save labels.argmax(1) in their place if they are classes")


def _resized(split: LabelledImages, size: int | None) -> LabelledImages:
    if size is None or not len(split.labels) or split.images.shape[2:] == (size, size):
        return split
    assert isinstance(split.images, Tensor)  # only folders are larger than the memory, and are read at their size
    return replace(split, images=resize(split.images, size, size))


def _require_usable_shapes(train: LabelledImages, **others: LabelledImages | None) -> None:
    shape = train.images.shape[1:]
    if min(shape[1:]) < SMALLEST_SIDE:
        raise UserError(
            f"the training images are {shape[1]}x{shape[2]} pixels; expected at least {SMALLEST_SIDE} a side: use "
            "larger images, or set data.image_size"
        )
    for name, split in others.items():
        if split is not None and len(split.images) and split.images.shape[1:] != shape:
            shapes = ["x".join(map(str, sides)) for sides in (shape, split.images.shape[1:])]
            raise UserError(
                f"training images are {shapes[0]} but {name} images are {shapes[1]} (channels x height x width); "
                "make them equal, or set data.image_size where only the size differs"
            )


def _load_public_images(options: DataOptions, shape: torch.Size) -> Tensor:
    """Read `public_path` as uint8 [n, *shape]; gray images and colours become what the training images are.

    Other numbers of channels must be those of the training images.
    """
    assert options.public_path is not None
    path = expand_home(options.public_path)
    channels, height, width = shape
    kind = kind_of(path)
    if kind == "missing":
        raise UserError(
            f"there is no file or folder {printable(path)}; set data.public_path to an .npz or an image folder, or use "
            "data.public_holdout=NUMBER"
        )
    if kind == "folder":
        files, others = list_files(path, options.follow_links)
        notify_of_left_out(others, path)
        if not files:
            raise UserError(
                f"{printable(path)} holds no image; data.public_path must name a folder with images or an .npz file"
            )
        in_memory = options.model_copy(update={"channels": channels, "memory_limit": math.inf})
        images = decode_images(sorted(files), in_memory, height, width)[0][:]
    else:
        (images,) = images_in(path, _PUBLIC_KEYS, options.window, channels, most=1).values()
    if images.shape[2:] != (height, width):
        images = resize(images, height, width)
    return images


def _draw(split: LabelledImages, count: int, seed: int, stream: int) -> tuple[LabelledImages, LabelledImages]:
    """Return `count` random samples and the others, each in their order."""
    order = torch.from_numpy(np.random.default_rng([seed, stream]).permutation(len(split.labels)))
    return split.rows(order[:count].sort().values), split.rows(order[count:].sort().values)


def balanced_subset(split: LabelledImages, limit: int, seed: int, stream: int) -> LabelledImages:
    """Return at most `limit` samples in their order, with classes as equal in size as the data allow (within one)."""
    order = np.random.default_rng([seed, stream]).permutation(len(split.labels))
    shuffled = split.labels.numpy()[order]
    rank_in_class = np.empty(len(order), np.int64)
    for label in np.unique(shuffled):
        members = np.flatnonzero(shuffled == label)
        rank_in_class[members] = np.arange(len(members))
    chosen = order[np.argsort(rank_in_class, kind="stable")[:limit]]
    return split.rows(torch.from_numpy(np.sort(chosen)))
