"""Reading .npz files, and a one-line error for each way in which one can be wrong."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.data.options import DataOptions
from tests.fedssl.data.data_files import good_arrays, load_npz, random_pixels, refused, save


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


def test_masks_of_0_and_1(tmp_path, caplog):
    """As type bool they are black and white; as numbers they are pixels of 255, and nothing is guessed."""
    mask = random_pixels(4, 6, 8) % 2
    assert load_npz(save(tmp_path / "a.npz", x=mask == 1)).train_images.unique().tolist() == [0, 255]
    assert caplog.text == ""
    for dtype in ("u1", "i8"):
        assert load_npz(save(tmp_path / "b.npz", x=mask.astype(dtype))).train_images.unique().tolist() == [0, 1]
        assert "has no pixel above 1 of 255, so that all is black: save pixels of 0 and 1 as type bool" in caplog.text
        caplog.clear()


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
