"""Public images from a file or folder of their own."""

import numpy as np
import pytest

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from tests.fedssl.data.data_files import good_arrays, load_npz, random_pixels, refused, save


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
