"""The digits, and what the seed and the limits decide."""

import numpy as np
import torch
from torch import Tensor

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions

from .data_files import good_arrays, load_npz, save


def image_set(images: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_digits():
    digits = load_dataset(DataOptions(), 0)
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.train_labels.dtype == digits.test_labels.dtype == torch.int64
    assert digits.class_names == tuple("0123456789")
    assert digits.public_images is None
    assert set(digits.train_images.unique().tolist()) == {round(value * 255 / 16) for value in range(17)}
    # Convolutions round differently with other strides, and published figures would change in their last digits.
    assert digits.train_images.stride() == digits.test_images.stride() == (64, 1, 8, 1)
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
