"""Datasets in memory: uint8 images [n, C, H, W], int64 labels [n], and the public images of the alignment."""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import UserError
from ..options import Options

_SPLIT_KEYS = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
)
_VALIDATION_KEYS = (("x_val", "y_val"), ("val_images", "val_labels"))
_PUBLIC_KEYS = ("x", "x_train", "train_images")
_DEFAULT_FOLDER_SIZE = 32
_MOST_CLASSES = 65536

# One random stream per purpose, so that (for instance) a public_limit does not change the training images.
_HOLDOUT_STREAM, _TRAIN_STREAM, _TEST_STREAM, _PUBLIC_STREAM = range(1, 5)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, test and public images of one dataset, in memory, on the CPU.

    train_images: uint8 [n, C, H, W], C is 1 or 3; train_labels: int64 [n], 0 to len(class_names) - 1.
    test_images, test_labels: the same for the test set, with the same C, H and W.
    public_images: uint8 [L, C, H, W] without labels, Hetero-SSFL's representation alignment data; or None.
    validation_images, validation_labels: the official validation split, where a file has one (MedMNIST's): no client
        holds it, and only fine-tuning can be asked to use it.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    public_images: Tensor | None
    validation_images: Tensor | None = None
    validation_labels: Tensor | None = None


class DataOptions(Options):
    """Which images to load.

    path: the .npz file, the image folder (with train/ and test/), or the root of a torchvision set
        (default ~/.cache/fedssl).
    download: let torchvision fetch a missing set.
    public_path: unlabelled public images, a folder or an .npz (key x, x_train, train_images, or its only
        array).
    public_holdout: that many training images are taken out and become the public images, without labels.
    train_limit: at most that many training images (after the holdout), class-balanced, drawn by the seed.
    test_limit: at most that many test images, class-balanced, the same ones for every seed.
    public_limit: at most that many public images, drawn by the seed.
    image_size: resize to that many pixels a side, the longer side cut off where an image is not square (image
        folders need one: 32 where none is given).
    """

    name: Literal["digits", "cifar10", "cifar100", "fashion_mnist", "npz", "folder"] = "digits"
    path: Path | None = None
    download: bool = False
    public_path: Path | None = None
    public_holdout: int = Field(0, ge=0)
    train_limit: int | None = Field(None, ge=1)
    test_limit: int | None = Field(None, ge=1)
    public_limit: int | None = Field(None, ge=1)
    image_size: int | None = Field(None, ge=4)

    @model_validator(mode="after")
    def _consistent(self) -> "DataOptions":
        if self.name in ("npz", "folder") and self.path is None:
            what = "an .npz file" if self.name == "npz" else "a folder with train/ and test/"
            raise ValueError(f"name={self.name} needs path={what}")
        if self.name == "digits" and self.path is not None:
            raise ValueError("path is given but name=digits is built in; set name to npz, folder or a torchvision set")
        if self.public_path is not None and self.public_holdout > 0:
            raise ValueError("public_path and public_holdout are two sources of public images; give only one")
        return self


def load_dataset(options: DataOptions, seed: int) -> Dataset:
    """Read the dataset that `options` name; everything random (holdout, limits) follows from `seed` >= 0.

    The test images never depend on the seed, so that figures of different seeds compare.

    Raises:
        UserError: a missing, unreadable or unsuitable file; the message says what to do.
    """
    (train_images, train_labels, test_images, test_labels, class_names), validation = _load_splits(options)
    _same_shape(train_images, test_images, "test")
    if validation is not None:
        _same_shape(train_images, validation[0], "validation")

    public_images = None
    if options.public_path is not None:
        public_images = _load_public(options.public_path.expanduser(), train_images.shape[1:])
    elif options.public_holdout > 0:
        total = len(train_labels)
        if options.public_holdout >= total:
            raise UserError(
                f"data.public_holdout={options.public_holdout} leaves no training image of {total}; "
                f"lower it to at most {total - 1}"
            )
        order = torch.from_numpy(_generator(seed, _HOLDOUT_STREAM).permutation(total))
        held_out, kept = order[: options.public_holdout], order[options.public_holdout :].sort().values
        public_images = train_images[held_out.sort().values]
        train_images, train_labels = train_images[kept], train_labels[kept]

    if options.train_limit is not None:
        chosen = _balanced_subset(train_labels, options.train_limit, _generator(seed, _TRAIN_STREAM))
        train_images, train_labels = train_images[chosen], train_labels[chosen]
    if options.test_limit is not None:
        chosen = _balanced_subset(test_labels, options.test_limit, _generator(0, _TEST_STREAM))
        test_images, test_labels = test_images[chosen], test_labels[chosen]
    if options.public_limit is not None and public_images is not None:
        order = torch.from_numpy(_generator(seed, _PUBLIC_STREAM).permutation(len(public_images)))
        public_images = public_images[order[: options.public_limit].sort().values]

    return Dataset(
        options.name,
        train_images,
        train_labels,
        test_images,
        test_labels,
        class_names,
        public_images,
        *(validation or (None, None)),
    )


_Splits = tuple[Tensor, Tensor, Tensor, Tensor, tuple[str, ...]]
_Validation = tuple[Tensor, Tensor] | None


def _load_splits(options: DataOptions) -> tuple[_Splits, _Validation]:
    validation: _Validation = None
    if options.name == "folder":
        assert options.path is not None
        return _load_folder(options.path.expanduser(), options.image_size or _DEFAULT_FOLDER_SIZE), None
    if options.name == "npz":
        assert options.path is not None
        splits, validation = _load_npz(options.path.expanduser())
    elif options.name == "digits":
        splits = _load_digits()
    else:
        root = (options.path or Path("~/.cache/fedssl")).expanduser()
        splits = _load_torchvision(options.name, root, options.download)
    if options.image_size is None:
        return splits, validation
    train_images, train_labels, test_images, test_labels, class_names = splits
    train_images = _resize(train_images, options.image_size, options.image_size)
    test_images = _resize(test_images, options.image_size, options.image_size)
    if validation is not None:
        validation = (_resize(validation[0], options.image_size, options.image_size), validation[1])
    return (train_images, train_labels, test_images, test_labels, class_names), validation


# ---- digits and torchvision --------------------------------------------------------------------------------


def _load_digits() -> _Splits:
    """scikit-learn's 1797 digits of 8x8 pixels; a fixed, stratified fifth of them is the test set."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, test = np.sort(train), np.sort(test)
    return (
        torch.from_numpy(images[train]),
        torch.from_numpy(labels[train]),
        torch.from_numpy(images[test]),
        torch.from_numpy(labels[test]),
        tuple(str(name) for name in digits.target_names),
    )


def _load_torchvision(name: str, root: Path, download: bool) -> _Splits:
    from torchvision import datasets

    kinds = {
        "cifar10": datasets.CIFAR10,
        "cifar100": datasets.CIFAR100,
        "fashion_mnist": datasets.FashionMNIST,
    }
    try:
        train, test = (kinds[name](root, train=is_train, download=download) for is_train in (True, False))
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        if download:
            raise UserError(
                f"{name} could not be downloaded to {root} ({_brief(error)}); "
                "check the network and the disk, or set data.path to a folder that holds it"
            ) from error
        raise UserError(
            f"{name} is not complete under {root}; "
            "set data.download=true to fetch it, or data.path to the folder that holds it"
        ) from error
    tensors = []
    for split in (train, test):
        tensors += [_channels_first(np.asarray(split.data), name), torch.as_tensor(split.targets).long()]
    return tensors[0], tensors[1], tensors[2], tensors[3], tuple(train.classes)


# ---- .npz files ----------------------------------------------------------------------------------------


def _load_npz(path: Path) -> tuple[_Splits, _Validation]:
    with _open_npz(path) as archive:
        found = set(archive.files)
        keys = next((names for names in _SPLIT_KEYS if found.issuperset(names)), None)
        if keys is None:
            accepted = " or ".join(", ".join(names) for names in _SPLIT_KEYS)
            raise UserError(f"{path} has the arrays {_listed(archive.files)}; expected {accepted}")
        parts = [keys[:2], keys[2:], *[pair for pair in _VALIDATION_KEYS if found.issuperset(pair)][:1]]
        arrays = [(_read_array(archive, path, x), _read_array(archive, path, y)) for x, y in parts]
        names = _read_array(archive, path, "class_names") if "class_names" in found else None

    labels = []
    for (image_key, label_key), (images, raw) in zip(parts, arrays, strict=True):
        labels.append(_to_labels(raw, f"{label_key} in {path}"))
        if len(images) != len(raw):
            raise UserError(
                f"{path}: {image_key} has {len(images)} images but {label_key} has {len(raw)} labels; they must match"
            )
    converted = _to_uint8({f"{key} in {path}": images for (key, _), (images, _) in zip(parts, arrays, strict=True)})
    tensors = [_channels_first(array, where) for where, array in converted.items()]
    classes = 1 + int(max(part.max() for part in labels))
    splits = (tensors[0], labels[0], tensors[1], labels[1], _class_names(names, classes, path))
    return splits, (tensors[2], labels[2]) if len(tensors) > 2 else None


def _open_npz(path: Path) -> Any:
    if path.is_dir():
        raise UserError(f"{path} is a folder, not an .npz file; set data.path to a file, or data.name=folder")
    if not path.exists():
        raise UserError(f"there is no file {path}; set data.path=FILE.npz to one that exists")
    try:
        archive = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({_brief(error)}); check its permissions and the disk") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as an .npz file; write it with numpy.savez_compressed") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UserError(f"{path} is a single array, not an .npz file; write it with numpy.savez_compressed")
    return archive


def _read_array(archive: Any, path: Path, key: str) -> NDArray[Any]:
    try:
        return np.asarray(archive[key])
    except ValueError as error:
        # NumPy refuses to unpickle: an object array could run any code while it is read.
        if "allow_pickle" in str(error):
            raise UserError(
                f"{path}: {key} is an object array, which is never read; save it as numbers (or strings)"
            ) from error
        raise UserError(f"{path}: {key} is corrupt ({_brief(error)}); copy or write the file again") from error
    except (OSError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: {key} is corrupt ({_brief(error)}); copy or write the file again") from error


def _to_labels(array: NDArray[Any], where: str) -> Tensor:
    """[n] or [n, 1] integers from 0 to int64 [n]."""
    if array.dtype.kind not in "iub":
        raise UserError(f"{where} has type {array.dtype}; labels must be integers from 0")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(f"{where} has shape {list(array.shape)}; expected [n] or [n, 1], one class an image")
    if len(array) == 0:
        raise UserError(f"{where} is empty; at least one label is needed")
    if array.min() < 0:
        raise UserError(f"{where} has {int((array < 0).sum())} negative labels; labels must be 0, 1, 2, ...")
    if array.max() >= _MOST_CLASSES:
        raise UserError(f"{where} has the label {array.max()}; renumber the classes 0, 1, 2, ...")
    return torch.from_numpy(array.astype(np.int64))


def _class_names(names: NDArray[Any] | None, classes: int, path: Path) -> tuple[str, ...]:
    if names is None:
        return tuple(str(index) for index in range(classes))
    if names.ndim != 1 or len(names) < classes:
        raise UserError(
            f"{path}: class_names has shape {list(names.shape)} but the labels reach {classes - 1}; "
            f"expected at least {classes} names (or leave class_names out)"
        )
    return tuple(name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in names.tolist())


def _to_uint8(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.uint8]]:
    """Pixels to 0..255; whether floats mean [0, 1] or [0, 255] is decided over all of `arrays` together."""
    for where, array in arrays.items():
        if array.dtype.kind not in "iubf":
            raise UserError(f"{where} has type {array.dtype}; pixels must be uint8 (or floats in [0, 1] or [0, 255])")
        if array.size == 0:
            raise UserError(f"{where} is empty (shape {list(array.shape)}); at least one image is needed")
        if array.dtype.kind == "f":
            not_finite = array.size - int(np.isfinite(array).sum())
            if not_finite > 0:
                raise UserError(
                    f"{where} has {not_finite} pixels that are NaN or infinite; repair or drop those images"
                )
        if array.dtype.kind != "b" and (array.min() < 0 or array.max() > 255):
            raise UserError(
                f"{where} has pixels from {array.min():g} to {array.max():g}; "
                "expected uint8, or floats in [0, 1] or [0, 255]"
            )
    brightest = max((float(array.max()) for array in arrays.values() if array.dtype.kind == "f"), default=0.0)
    float_scale = 255.0 if brightest <= 1.0 else 1.0
    converted = {}
    for where, array in arrays.items():
        if array.dtype.kind == "f":
            converted[where] = np.rint(array.astype(np.float32) * float_scale).astype(np.uint8)
        else:
            converted[where] = array.astype(np.uint8) * np.uint8(255 if array.dtype.kind == "b" else 1)
    return converted


def _channels_first(array: NDArray[Any], where: str) -> Tensor:
    """NHW, NHWC or NCHW with 1 or 3 channels to a tensor [n, C, H, W]. NHWC wins where both fit."""
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    elif not (array.ndim == 4 and array.shape[1] in (1, 3)):
        raise UserError(
            f"{where} has shape {list(array.shape)}; expected [n, H, W] or [n, H, W, C] with 1 or 3 channels"
        )
    return torch.from_numpy(np.ascontiguousarray(array))


# ---- image folders -------------------------------------------------------------------------------------


def _load_folder(path: Path, size: int) -> _Splits:
    """train/CLASS/*.jpg and test/CLASS/*.jpg, read as gray where every file is gray and as RGB otherwise."""
    from torchvision.datasets import ImageFolder

    folders = []
    for split in ("train", "test"):
        if not (path / split).is_dir():
            raise UserError(f"there is no folder {path / split}; data.path must hold train/CLASS/ and test/CLASS/")
        try:
            folders.append(ImageFolder(str(path / split)))
        except FileNotFoundError as error:
            raise UserError(
                f"{path / split} needs one folder of images a class, none of them empty ({_brief(error)})"
            ) from error
    train, test = folders
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise UserError(f"{path / 'test'} has classes that train/ lacks: {_listed(unknown)}; make the folders match")
    train_images, train_gray = _decode([Path(name) for name, _ in train.samples], size, size)
    test_images, test_gray = _decode([Path(name) for name, _ in test.samples], size, size)
    if train_gray and test_gray:
        train_images, test_images = train_images[:, :1].contiguous(), test_images[:, :1].contiguous()
    # A test folder may lack classes, so its own numbering is not the training folder's.
    test_labels = [train.class_to_idx[test.classes[label]] for _, label in test.samples]
    return (
        train_images,
        torch.tensor([label for _, label in train.samples]),
        test_images,
        torch.tensor(test_labels),
        tuple(train.classes),
    )


def _decode(files: Sequence[Path], height: int, width: int) -> tuple[Tensor, bool]:
    """uint8 [n, 3, height, width] of the files (centre-cropped to that shape), and whether all were gray."""
    from PIL import Image, ImageOps

    images = np.empty((len(files), height, width, 3), np.uint8)
    all_gray = True
    for index, file in enumerate(files):
        try:
            with Image.open(file) as image:
                all_gray = all_gray and image.mode in ("1", "L", "LA")
                images[index] = np.asarray(
                    ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BILINEAR)
                )
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{file} cannot be read as an image ({_brief(error)}); repair or remove it") from error
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), all_gray


# ---- public images -------------------------------------------------------------------------------------


def _load_public(path: Path, shape: torch.Size) -> Tensor:
    """Unlabelled images, brought to the training images' `shape` (C, H, W)."""
    channels, height, width = shape
    if not path.exists():
        raise UserError(
            f"there is no file or folder {path}; set data.public_path to an .npz or an image folder, or use "
            "data.public_holdout=NUMBER"
        )
    if path.is_dir():
        from torchvision.datasets.folder import IMG_EXTENSIONS

        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS and file.is_file())
        if not files:
            raise UserError(f"{path} holds no image; data.public_path must name a folder with images or an .npz file")
        images, all_gray = _decode(files, height, width)
        if all_gray:
            images = images[:, :1].contiguous()
    else:
        with _open_npz(path) as archive:
            only = archive.files if len(archive.files) == 1 else []
            keys = [key for key in _PUBLIC_KEYS if key in archive.files] or only
            if not keys:
                raise UserError(
                    f"{path} has the arrays {_listed(archive.files)}; "
                    f"expected one of {', '.join(_PUBLIC_KEYS)}, or a single array"
                )
            array = _read_array(archive, path, keys[0])
        where = f"{keys[0]} in {path}"
        images = _channels_first(_to_uint8({where: array})[where], where)

    if images.shape[1] == 3 and channels == 1:
        raise UserError(
            f"the public images of {path} are in colour but the training images are gray; "
            "convert them to gray, or set data.public_holdout instead of data.public_path"
        )
    if images.shape[2:] != (height, width):
        images = _resize(images, height, width)
    return images.expand(-1, channels, -1, -1).contiguous()


# ---- helpers -------------------------------------------------------------------------------------------


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    """The centre of the images, cut to the target's shape, resized with an antialiasing bilinear filter."""
    from torchvision.transforms.v2 import functional

    old_height, old_width = images.shape[2:]
    scale = min(old_height / height, old_width / width)
    box = [max(1, round(height * scale)), max(1, round(width * scale))]
    # In parts, since the filter may work in float and a whole dataset would take four times its memory.
    parts = [
        functional.resize(functional.center_crop(part, box), [height, width], antialias=True)
        for part in images.split(1024)
    ]
    return torch.cat(parts)


def _balanced_subset(labels: Tensor, limit: int, generator: np.random.Generator) -> Tensor:
    """Sorted indices of `limit` samples (or all, if fewer), of each class as many as possible, within one."""
    order = generator.permutation(len(labels))
    shuffled = labels.numpy()[order]
    rank_in_class = np.empty(len(labels), np.int64)
    for label in np.unique(shuffled):
        members = np.flatnonzero(shuffled == label)
        rank_in_class[members] = np.arange(len(members))
    first = np.argsort(rank_in_class, kind="stable")[:limit]
    return torch.from_numpy(np.sort(order[first]))


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream])


def _same_shape(train: Tensor, other: Tensor, name: str) -> None:
    if train.shape[1:] != other.shape[1:]:
        shapes = ["x".join(str(side) for side in images.shape[1:]) for images in (train, other)]
        raise UserError(
            f"training images are {shapes[0]} but {name} images are {shapes[1]} (channels x height x width); "
            "make them equal, or set data.image_size where only the size differs"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10]) if names else "(none)"
    return f"{shown}, and {len(names) - 10} more" if len(names) > 10 else shown


def _brief(error: BaseException) -> str:
    """The first line of an error's message, so that ours stays one line."""
    lines = str(error).splitlines()
    return lines[0][:160] if lines else type(error).__name__
