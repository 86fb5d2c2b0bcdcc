"""The digits and torchvision's sets, what the seed and the limits decide, and public images from files of their own."""

import types
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torchvision import datasets as torchvision_datasets

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.data.partitions import PartitionOptions
from tests.fedssl.data.data_files import good_arrays, load_npz, random_pixels, refused, save


def bytes_of(images: Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_digits():
    digits = load_dataset(DataOptions(), 0)
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.train_labels.dtype == digits.test_labels.dtype == torch.int64
    assert digits.class_names == tuple("0123456789")
    assert digits.public_images is None
    assert digits.test_labels[:8].tolist() == [1, 4, 8, 6, 5, 9, 9, 1]  # published figures are of this test set
    assert set(digits.train_images.unique().tolist()) == {round(value * 255 / 16) for value in range(17)}
    # Convolutions round differently with other strides, and published figures would change in their last digits.
    assert digits.train_images.stride() == digits.test_images.stride() == (64, 1, 8, 1)
    shares = digits.test_labels.bincount() / (digits.test_labels.bincount() + digits.train_labels.bincount())
    assert ((shares - 0.2).abs() < 0.005).all()


def test_limits_are_balanced_and_the_seed_decides_on_training_images_alone(tmp_path):
    options = DataOptions(train_limit=104, test_limit=55)
    digits, again, other = (load_dataset(options, seed) for seed in (7, 7, 1))
    assert set(digits.train_labels.bincount().tolist()) == {10, 11}
    assert set(digits.test_labels.bincount().tolist()) == {5, 6}
    assert len(digits.train_labels) == 104
    assert torch.equal(digits.train_images, again.train_images)
    assert torch.equal(digits.test_images, other.test_images)
    assert set(bytes_of(digits.train_images)) != set(bytes_of(other.train_images))
    whole = load_dataset(DataOptions(train_limit=10**6), 7)
    assert torch.equal(whole.train_images, load_dataset(DataOptions(), 0).train_images)
    arrays = good_arrays() | {"y_train": np.array([0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2])}
    of_a_rare_class = load_npz(save(tmp_path / "a.npz", **arrays), train_limit=8)
    assert of_a_rare_class.train_labels.bincount().tolist() == [2, 3, 3]


def test_holdout_moves_images_to_the_public_set_and_its_limit_leaves_the_training_images():
    options = DataOptions(public_holdout=300)
    digits, whole = load_dataset(options, 3), load_dataset(DataOptions(), 3)
    assert digits.public_images is not None
    assert len(digits.public_images) == 300
    assert len(digits.train_images) == len(digits.train_labels) == 1137
    together = torch.cat((digits.public_images, digits.train_images))
    assert sorted(bytes_of(together)) == sorted(bytes_of(whole.train_images))
    label_of = dict(zip(bytes_of(whole.train_images), whole.train_labels.tolist(), strict=True))
    assert [label_of[image] for image in bytes_of(digits.train_images)] == digits.train_labels.tolist()
    again, other = load_dataset(options, 3), load_dataset(options, 4)
    assert torch.equal(again.public_images, digits.public_images)
    assert not torch.equal(other.public_images, digits.public_images)
    refused(r"public_holdout=1437 leaves no training image of 1437", DataOptions(public_holdout=1437))
    limited = load_dataset(options.model_copy(update={"public_limit": 40}), 3)
    assert len(limited.public_images) == 40
    assert set(bytes_of(limited.public_images)) <= set(bytes_of(digits.public_images))
    assert torch.equal(limited.train_images, digits.train_images)


def test_images_of_one_pixel_are_refused(tmp_path):
    arrays = good_arrays() | {"x_train": np.zeros((12, 1, 1), "u1"), "x_test": np.zeros((5, 1, 1), "u1")}
    path = save(tmp_path / "a.npz", **arrays)
    refused(r"training images are 1x1 pixels; expected at least 2 a side", DataOptions(name="npz", path=path))
    assert load_npz(path, image_size=4).train_images.shape == (12, 1, 4, 4)


def test_public_npz_is_brought_to_the_training_shape(tmp_path):
    arrays, gray = good_arrays(), random_pixels(7, 6, 8)
    path = save(tmp_path / "a.npz", **arrays)

    def public(**public_arrays: np.ndarray) -> Tensor:
        images = load_npz(path, public_path=save(tmp_path / "p.npz", **public_arrays)).public_images
        assert images is not None
        return images

    same = public(x=arrays["x_test"], index=np.arange(5))
    assert np.array_equal(same.permute(0, 2, 3, 1).numpy(), arrays["x_test"])
    assert np.array_equal(public(anything=gray).numpy(), np.stack([gray] * 3, 1))
    assert public(x_train=random_pixels(4, 18, 24, 3), y_train=np.arange(4)).shape == (4, 3, 6, 8)


def test_public_images_are_shrunk_with_a_filter_after_their_centre_is_cut(tmp_path):
    """A checkerboard of single pixels becomes gray; a wide image's outer columns are cut, not squeezed in."""
    board = ((np.indices((64, 64)).sum(0) % 2) * 255).astype(np.uint8)[None]
    wide = np.zeros((1, 8, 16), np.uint8)
    wide[:, :, 4:12] = 200
    gray, middle = (
        load_dataset(DataOptions(public_path=save(tmp_path / "p.npz", x=array)), 0).public_images
        for array in (board, wide)
    )
    assert gray.shape == (1, 1, 8, 8)
    assert ((gray.int() - 127).abs() <= 12).all()
    assert middle.unique().tolist() == [200]


def test_bad_public_images(tmp_path):
    (tmp_path / "bare").mkdir()
    for path, says in (
        (save(tmp_path / "a.npz", x=np.full((4, 8, 8), np.nan)), r"x in .* 256 pixels that are NaN"),
        (
            save(tmp_path / "b.npz", a=random_pixels(4, 8, 8), b=np.arange(4)),
            r"arrays a, b; expected one of x, x_train",
        ),
        (save(tmp_path / "c.npz"), r"arrays \(none\); expected"),
        (tmp_path / "gone", r"no file or folder .*gone; set data\.public_path"),
        (tmp_path / "bare", r"bare holds no image"),
    ):
        refused(says, DataOptions(public_path=path))


# torchvision's sets, from files that are written as theirs are


@pytest.mark.parametrize(
    ("name", "kind", "shape"), [("cifar10", "CIFAR10", (32, 32, 3)), ("fashion_mnist", "FashionMNIST", (28, 28))]
)
def test_what_torchvision_reads_becomes_images_of_channels(name, kind, shape, monkeypatch, tmp_path):
    pixels, targets = random_pixels(4, *shape), [3, 1, 2, 9]

    def read(root, train, download):
        assert (root, download) == (tmp_path, False)
        part = slice(0, 4) if train else slice(1, 3)
        return types.SimpleNamespace(data=pixels[part], targets=targets[part], classes=["shirt", "shoe"])

    monkeypatch.setattr(torchvision_datasets, kind, read)
    data = load_dataset(DataOptions(name=name, path=tmp_path), 0)
    images = pixels.reshape(4, *shape[:2], -1).transpose(0, 3, 1, 2)
    assert np.array_equal(data.train_images.numpy(), images)
    assert np.array_equal(data.test_images.numpy(), images[1:3])
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == (targets, targets[1:3])
    assert data.class_names == ("shirt", "shoe")


def test_torchvision_sets_that_are_missing_or_cannot_be_downloaded(tmp_path, monkeypatch):
    for name in ("cifar10", "cifar100", "fashion_mnist"):
        says = rf"{name} is not complete under .*; set data\.download=true"
        refused(says, DataOptions(name=name, path=tmp_path))
    monkeypatch.setattr(torchvision_datasets, "CIFAR10", Mock(side_effect=URLError("no network")))
    options = DataOptions(name="cifar10", path=tmp_path, download=True)
    refused(r"cifar10 could not be downloaded to .*no network", options)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        *((DataOptions, {"name": name}, f"name={name} needs path=") for name in ("npz", "folder", "images")),
        (DataOptions, {"path": "a.npz"}, "path is given but name=digits"),
        (DataOptions, {"public_path": "p.npz", "public_holdout": 5}, "two sources of public images"),
        (DataOptions, {"labels": "folders"}, "labels is for name=images, not for name=digits"),
        (DataOptions, {"name": "npz", "path": "a.npz", "test_fraction": 0.5}, "test_fraction is for name=images with"),
        (DataOptions, {"name": "images", "path": ".", "label_column": "a"}, "columns of a table: set labels to a CSV"),
        *((DataOptions, {"window": each}, "window") for each in ((3, 3), (9, 1), (1,), "wide", (0, float("nan")))),
        (PartitionOptions, {"name": "iid", "classes_per_client": 2}, "classes_per_client is for name=disjoint_classes"),
        (PartitionOptions, {"name": "column"}, "name=column needs column=NAME"),
        (PartitionOptions, {"name": "iid", "column": "site"}, "column is for name=column"),
        (PartitionOptions, {"alpha": 5}, "alpha is for name=dirichlet or .*not for name=disjoint_classes"),
    ],
)
def test_options_that_contradict_each_other_are_refused(kind, options, says):
    with pytest.raises(ValidationError, match=says):
        kind(**options)
