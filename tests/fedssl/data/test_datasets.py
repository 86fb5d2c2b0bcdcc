"""Reading each kind of data, what the seed decides, and a one-line error for each way a file can be wrong."""

import hashlib
import pickle
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor
from torchvision import datasets as torchvision_datasets

from fedssl.data.datasets import DataOptions, Dataset, load_dataset
from fedssl.errors import UserError


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def good_arrays() -> dict[str, np.ndarray]:
    return {
        "x_train": random_pixels(12, 6, 8, 3),
        "y_train": np.arange(12) % 3,
        "x_test": random_pixels(5, 6, 8, 3, seed=1),
        "y_test": np.arange(5) % 3,
    }


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def load_npz(path: Path, seed: int = 0, **options: object) -> Dataset:
    return load_dataset(DataOptions(name="npz", path=path, **options), seed)


def image_set(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def refused(says: str, options: DataOptions) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_dataset(options, 0)
    assert "\n" not in str(caught.value)


# ---- digits --------------------------------------------------------------------------------------------


def test_digits():
    digits = load_dataset(DataOptions(), 0)
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.train_labels.dtype == digits.test_labels.dtype == torch.int64
    assert digits.class_names == tuple("0123456789")
    assert digits.public_images is None
    assert set(digits.train_images.unique().tolist()) == {round(value * 255 / 16) for value in range(17)}
    shares = digits.test_labels.bincount() / (digits.test_labels.bincount() + digits.train_labels.bincount())
    assert ((shares - 0.2).abs() < 0.005).all()


def test_the_test_split_does_not_depend_on_the_seed():
    options = DataOptions(test_limit=55, train_limit=100)
    first, other = load_dataset(options, 0), load_dataset(options, 1)
    assert torch.equal(first.test_images, other.test_images)
    assert image_set(first.train_images) != image_set(other.train_images)


def test_limits_are_balanced_and_seeded():
    options = DataOptions(train_limit=104, test_limit=55)
    digits, again = load_dataset(options, 7), load_dataset(options, 7)
    assert set(digits.train_labels.bincount().tolist()) == {10, 11}
    assert set(digits.test_labels.bincount().tolist()) == {5, 6}
    assert len(digits.train_labels) == 104
    assert torch.equal(digits.train_images, again.train_images)
    whole = load_dataset(DataOptions(train_limit=10**6), 7)
    assert torch.equal(whole.train_images, load_dataset(DataOptions(), 0).train_images)


def test_a_limit_takes_all_of_a_rare_class(tmp_path):
    arrays = good_arrays() | {"y_train": np.array([0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2])}
    limited = load_npz(save(tmp_path / "a.npz", **arrays), train_limit=8)
    assert limited.train_labels.bincount().tolist() == [2, 3, 3]


def test_holdout_moves_images_to_the_public_set():
    options = DataOptions(public_holdout=300)
    digits, whole = load_dataset(options, 3), load_dataset(DataOptions(), 3)
    assert digits.public_images is not None
    assert len(digits.public_images) == 300
    assert len(digits.train_images) == len(digits.train_labels) == 1137
    together = torch.cat((digits.public_images, digits.train_images))
    assert sorted(i.numpy().tobytes() for i in together) == sorted(i.numpy().tobytes() for i in whole.train_images)
    # Labels stay with their images.
    label_of = {i.numpy().tobytes(): int(y) for i, y in zip(whole.train_images, whole.train_labels, strict=True)}
    assert [label_of[i.numpy().tobytes()] for i in digits.train_images] == digits.train_labels.tolist()
    again, other = load_dataset(options, 3), load_dataset(options, 4)
    assert torch.equal(again.public_images, digits.public_images)
    assert not torch.equal(other.public_images, digits.public_images)


def test_a_public_limit_does_not_change_the_training_images():
    options = DataOptions(public_holdout=300, train_limit=50)
    full = load_dataset(options, 3)
    limited = load_dataset(options.model_copy(update={"public_limit": 40}), 3)
    assert len(limited.public_images) == 40
    assert image_set(limited.public_images) <= image_set(full.public_images)
    assert torch.equal(limited.train_images, full.train_images)


def test_image_size_resizes():
    digits = load_dataset(DataOptions(image_size=16, train_limit=20), 0)
    assert digits.train_images.shape == (20, 1, 16, 16)
    assert digits.test_images.shape == (360, 1, 16, 16)
    assert digits.train_images.dtype == torch.uint8


# ---- npz -----------------------------------------------------------------------------------------------


def test_npz_of_both_kinds(tmp_path):
    arrays = good_arrays()
    plain = load_npz(save(tmp_path / "a.npz", **arrays, class_names=np.array(["cat", "dog", "owl"])))
    assert plain.train_images.shape == (12, 3, 6, 8)
    assert plain.train_images.is_contiguous()
    assert np.array_equal(plain.train_images.permute(0, 2, 3, 1).numpy(), arrays["x_train"])
    assert plain.train_labels.tolist() == arrays["y_train"].tolist()
    assert plain.class_names == ("cat", "dog", "owl")
    medmnist = load_npz(
        save(
            tmp_path / "b.npz",
            train_images=arrays["x_train"],
            train_labels=arrays["y_train"][:, None].astype(np.uint8),
            val_images=arrays["x_test"],
            test_images=arrays["x_test"],
            test_labels=arrays["y_test"][:, None].astype(np.uint8),
        )
    )
    assert torch.equal(medmnist.train_images, plain.train_images)
    assert torch.equal(medmnist.test_labels, plain.test_labels)
    assert medmnist.test_labels.dtype == torch.int64
    assert medmnist.class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ((6, 8), (1, 6, 8)),
        ((6, 8, 1), (1, 6, 8)),
        ((1, 6, 8), (1, 6, 8)),
        ((3, 6, 8), (3, 6, 8)),
        ((3, 6, 3), (3, 3, 6)),
    ],
)
def test_npz_layouts(tmp_path, stored, expected):
    arrays = good_arrays() | {"x_train": random_pixels(12, *stored), "x_test": random_pixels(5, *stored)}
    loaded = load_npz(save(tmp_path / "a.npz", **arrays))
    assert loaded.train_images.shape == (12, *expected)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ">f4", "i8"])
def test_npz_pixel_types(tmp_path, dtype):
    arrays = good_arrays()
    wanted = load_npz(save(tmp_path / "a.npz", **arrays))
    as_255 = {key: arrays[key].astype(dtype) if key[0] == "x" else arrays[key] for key in arrays}
    assert torch.equal(load_npz(save(tmp_path / "b.npz", **as_255)).train_images, wanted.train_images)
    if dtype != "i8":
        as_1 = {key: (arrays[key] / 255).astype(dtype) if key[0] == "x" else arrays[key] for key in arrays}
        assert torch.equal(load_npz(save(tmp_path / "c.npz", **as_1)).train_images, wanted.train_images)


def test_dark_test_floats_have_the_training_scale(tmp_path):
    """Floats of 0 and 1 beside floats up to 255 are nearly black, not white."""
    arrays = good_arrays()
    arrays["x_train"] = arrays["x_train"].astype(np.float32)
    arrays["x_test"] = np.ones((5, 6, 8, 3), np.float32)
    assert load_npz(save(tmp_path / "a.npz", **arrays)).test_images.unique().tolist() == [1]


def without(key: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in good_arrays().items() if name != key}


def spoiled_pixels(value: float, count: int) -> np.ndarray:
    pixels = np.zeros((5, 6, 8, 3), np.float32)
    pixels.reshape(-1)[:count] = value
    return pixels


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x_test": spoiled_pixels(np.nan, 4)}, r"x_test in .* 4 pixels that are NaN or infinite"),
        ({"x_test": spoiled_pixels(-np.inf, 1)}, r"x_test in .* 1 pixels that are NaN"),
        ({"x_test": spoiled_pixels(-0.5, 1)}, r"x_test in .* from -0\.5 to 0"),
        ({"x_test": spoiled_pixels(256, 1)}, r"from 0 to 256"),
        ({"x_train": random_pixels(11, 6, 8, 3)}, r"x_train has 11 images but y_train has 12 labels"),
        ({"y_test": np.arange(4)}, r"x_test has 5 images but y_test has 4 labels"),
        ({"x_test": random_pixels(0, 6, 8, 3), "y_test": np.zeros(0, int)}, r"y_test in .* is empty"),
        ({"x_train": random_pixels(12, 0, 8, 3)}, r"x_train in .* is empty \(shape \[12, 0, 8, 3\]\)"),
        ({"y_train": np.arange(12) - 1}, r"y_train in .* 1 negative labels"),
        ({"y_train": np.arange(12) / 2}, r"y_train in .* type float64; labels must be integers"),
        ({"y_train": np.eye(12, dtype=int)}, r"y_train in .* shape \[12, 12\]"),
        ({"y_train": np.arange(12) * 10**9}, r"renumber the classes"),
        ({"x_train": np.array([None] * 12)}, r"x_train is an object array"),
        ({"y_test": np.array([0, 1, 2, "a", None], dtype=object)}, r"y_test is an object array"),
        ({"x_train": np.array(["a"] * 12)}, r"x_train in .* type <U1"),
        ({"x_train": random_pixels(12, 48)}, r"x_train in .* shape \[12, 48\]"),
        ({"x_train": random_pixels(12, 6, 8, 4)}, r"shape \[12, 6, 8, 4\].* 1 or 3 channels"),
        ({"x_test": random_pixels(5, 8, 8, 3)}, r"training images are 3x6x8 but test images are 3x8x8"),
        ({"x_test": random_pixels(5, 6, 8)}, r"training images are 3x6x8 but test images are 1x6x8"),
        ({"class_names": np.array(["cat", "dog"])}, r"class_names has shape \[2\] but the labels reach 2"),
    ],
)
def test_bad_npz_contents(tmp_path, change, says):
    path = save(tmp_path / "bad.npz", **(good_arrays() | change))
    refused(says, DataOptions(name="npz", path=path))


def test_wrong_keys_are_listed(tmp_path):
    path = save(tmp_path / "bad.npz", **without("y_test"))
    refused(
        r"arrays x_train, y_train, x_test; expected x_train, .* or train_images,", DataOptions(name="npz", path=path)
    )
    many = save(tmp_path / "many.npz", **{f"key{i}": np.zeros(1) for i in range(40)})
    refused(r"and 30 more", DataOptions(name="npz", path=many))


def test_missing_and_unreadable_files(tmp_path):
    def npz(path: Path) -> DataOptions:
        return DataOptions(name="npz", path=path)

    refused(r"no file .*nothing\.npz; set data\.path", npz(tmp_path / "nothing.npz"))
    refused(r"is a folder.*data\.name=folder", npz(tmp_path))
    (tmp_path / "text.npz").write_text("no archive")
    refused(r"text\.npz cannot be read as an \.npz", npz(tmp_path / "text.npz"))
    (tmp_path / "empty.npz").touch()
    refused(r"empty\.npz cannot be read", npz(tmp_path / "empty.npz"))
    np.save(tmp_path / "single.npy", np.zeros(3))
    refused(r"single array", npz(tmp_path / "single.npy"))
    whole = save(tmp_path / "whole.npz", **good_arrays()).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    refused(r"cut\.npz cannot be read", npz(tmp_path / "cut.npz"))
    flipped = bytearray(whole)
    flipped[500] ^= 255  # inside the first array's pixels: the archive's checksum tells
    (tmp_path / "flipped.npz").write_bytes(flipped)
    refused(r"x_train is corrupt", npz(tmp_path / "flipped.npz"))


def test_pickles_are_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "trap.npz").write_bytes(pickle.dumps(Trap()))
    refused("cannot be read", DataOptions(name="npz", path=tmp_path / "trap.npz"))
    path = save(tmp_path / "inner.npz", **(good_arrays() | {"x_train": np.array([Trap()] * 12)}))
    refused("object array", DataOptions(name="npz", path=path))
    refused("object array", DataOptions(public_path=save(tmp_path / "public.npz", x=np.array([Trap()]))))
    assert not (tmp_path / "sprung").exists()


# ---- public images -------------------------------------------------------------------------------------


def test_public_npz_is_brought_to_the_training_shape(tmp_path):
    arrays = good_arrays()
    path = save(tmp_path / "a.npz", **arrays)
    same = load_npz(path, public_path=save(tmp_path / "p.npz", x=arrays["x_test"], index=np.arange(5)))
    assert np.array_equal(same.public_images.permute(0, 2, 3, 1).numpy(), arrays["x_test"])
    gray = random_pixels(7, 6, 8)
    repeated = load_npz(path, public_path=save(tmp_path / "p.npz", anything=gray)).public_images
    assert repeated.shape == (7, 3, 6, 8)
    assert all(np.array_equal(repeated[:, channel].numpy(), gray) for channel in range(3))
    larger = load_npz(
        path, public_path=save(tmp_path / "p.npz", x_train=random_pixels(4, 18, 24, 3), y_train=np.arange(4))
    )
    assert larger.public_images.shape == (4, 3, 6, 8)


def test_shrinking_is_antialiased(tmp_path):
    """A checkerboard of single pixels becomes gray; sampled without a filter it would stay black or white."""
    board = ((np.indices((64, 64)).sum(0) % 2) * 255).astype(np.uint8)[None]
    digits = load_dataset(DataOptions(public_path=save(tmp_path / "p.npz", x=board)), 0)
    assert digits.public_images.shape == (1, 1, 8, 8)
    assert ((digits.public_images.int() - 127).abs() <= 12).all()


def test_resizing_cuts_the_centre(tmp_path):
    """The outer columns of a wide image are cut, not squeezed in."""
    wide = np.zeros((1, 8, 16), np.uint8)
    wide[:, :, 4:12] = 200
    digits = load_dataset(DataOptions(public_path=save(tmp_path / "p.npz", x=wide)), 0)
    assert digits.public_images.unique().tolist() == [200]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": random_pixels(4, 8, 8, 3)}, r"in colour but the training images are gray; convert"),
        ({"x": np.full((4, 8, 8), np.nan)}, r"x in .* 256 pixels that are NaN"),
        ({"x": random_pixels(0, 8, 8)}, r"x in .* is empty"),
        ({"a": random_pixels(4, 8, 8), "b": np.arange(4)}, r"arrays a, b; expected one of x, x_train"),
        ({}, r"arrays \(none\); expected"),
    ],
)
def test_bad_public_npz(tmp_path, arrays, says):
    refused(says, DataOptions(public_path=save(tmp_path / "p.npz", **arrays)))


def test_missing_public_path_and_large_holdout(tmp_path):
    refused(r"no file or folder .*gone; set data\.public_path", DataOptions(public_path=tmp_path / "gone"))
    (tmp_path / "bare").mkdir()
    refused(r"bare holds no image", DataOptions(public_path=tmp_path / "bare"))
    refused(r"public_holdout=1437 leaves no training image of 1437", DataOptions(public_holdout=1437))


# ---- image folders -------------------------------------------------------------------------------------


def write_image(path: Path, value: int, mode: str = "RGB", size: tuple[int, int] = (20, 12)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value)).save(path)


def test_image_folder(tmp_path):
    for split, classes in (("train", ("ant", "bee", "cow")), ("test", ("ant", "cow"))):
        for index, name in enumerate(classes):
            write_image(tmp_path / split / name / "1.png", 10 * index)
            write_image(tmp_path / split / name / "2.png", 100 + 10 * index)
    folder = load_dataset(DataOptions(name="folder", path=tmp_path), 0)
    assert folder.train_images.shape == (6, 3, 32, 32)
    assert folder.class_names == ("ant", "bee", "cow")
    assert folder.train_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert folder.test_labels.tolist() == [0, 0, 2, 2]  # numbered as in train/
    assert folder.train_images[:, 0, 5, 5].tolist() == [0, 100, 10, 110, 20, 120]
    assert load_dataset(DataOptions(name="folder", path=tmp_path, image_size=10), 0).test_images.shape[2:] == (10, 10)


def test_gray_folders_have_one_channel(tmp_path):
    for split in ("train", "test"):
        write_image(tmp_path / split / "a" / "1.png", 50, "L")
    write_image(tmp_path / "public" / "deep" / "1.PNG", 90, "L")
    write_image(tmp_path / "public" / "2.jpeg", 30, "L")
    (tmp_path / "public" / "notes.txt").write_text("not an image")
    options = DataOptions(name="folder", path=tmp_path, public_path=tmp_path / "public")
    folder = load_dataset(options, 0)
    assert folder.train_images.shape == (1, 1, 32, 32)
    assert folder.train_images.unique().tolist() == [50]
    assert folder.public_images.shape == (2, 1, 32, 32)
    write_image(tmp_path / "public" / "3.png", 30)
    refused("in colour", options)


def test_bad_folders(tmp_path):
    options = DataOptions(name="folder", path=tmp_path)
    refused(r"no folder .*train; data\.path must hold", options)
    write_image(tmp_path / "train" / "a" / "1.png", 1)
    (tmp_path / "test").mkdir()
    refused(r"test needs one folder of images a class", options)
    write_image(tmp_path / "test" / "b" / "1.png", 1)
    refused(r"classes that train/ lacks: b", options)
    (tmp_path / "test" / "b").rename(tmp_path / "test" / "a")
    load_dataset(options, 0)
    (tmp_path / "train" / "a" / "2.png").write_text("not an image")
    refused(r"2\.png cannot be read as an image", options)


# ---- torchvision ---------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def test_fashion_mnist_from_its_files(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    images = random_pixels(6, 28, 28)
    for split, count in (("train", 6), ("t10k", 4)):
        write_idx(raw / f"{split}-images-idx3-ubyte", images[:count])
        write_idx(raw / f"{split}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8))
    fashion = load_dataset(DataOptions(name="fashion_mnist", path=tmp_path), 0)
    assert np.array_equal(fashion.train_images[:, 0].numpy(), images)
    assert fashion.test_images.shape == (4, 1, 28, 28)
    assert fashion.test_labels.tolist() == [0, 1, 2, 3]
    assert fashion.class_names[9] == "Ankle boot"
    (raw / "train-images-idx3-ubyte").write_bytes(b"cut")
    refused("fashion_mnist is not complete", DataOptions(name="fashion_mnist", path=tmp_path))


def test_cifar10_from_its_files(tmp_path, monkeypatch):
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()

    def write(name: str, content: object) -> list[str]:
        data = pickle.dumps(content)
        (base / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    names = [f"class{i}" for i in range(10)]
    images = random_pixels(4, 3 * 32 * 32)
    kind = torchvision_datasets.CIFAR10
    monkeypatch.setattr(kind, "train_list", [write("train", {"data": images, "labels": [3, 1, 2, 9]})])
    monkeypatch.setattr(kind, "test_list", [write("test", {"data": images[:2], "labels": [0, 5]})])
    meta, digest = write("meta", {"label_names": names})
    monkeypatch.setattr(kind, "meta", {"filename": meta, "key": "label_names", "md5": digest})
    cifar = load_dataset(DataOptions(name="cifar10", path=tmp_path), 0)
    assert np.array_equal(cifar.train_images.numpy(), images.reshape(4, 3, 32, 32))
    assert cifar.train_labels.tolist() == [3, 1, 2, 9]
    assert cifar.class_names == tuple(names)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_missing_torchvision_sets(tmp_path, name):
    refused(rf"{name} is not complete under .*; set data\.download=true", DataOptions(name=name, path=tmp_path))


def test_failed_download(tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torchvision_datasets, "CIFAR10", fail)
    options = DataOptions(name="cifar10", path=tmp_path, download=True)
    refused(r"cifar10 could not be downloaded to .*no network", options)


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "npz"}, "name=npz needs path"),
        ({"name": "folder"}, "name=folder needs path"),
        ({"path": "a.npz"}, "path is given but name=digits"),
        ({"public_path": "p.npz", "public_holdout": 5}, "two sources of public images"),
        ({"name": "mnist"}, "name"),
        ({"train_limit": 0}, "train_limit"),
        ({"public_holdout": -1}, "public_holdout"),
        ({"size": 3}, "size"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(ValidationError, match=says):
        DataOptions(**options)
