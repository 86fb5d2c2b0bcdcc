"""What networks take of uint8 images; pixels of more bits are scaled by a stated window, and never clipped silently."""

import imagecodecs
import numpy as np
import pytest
import torch

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.data.pixels import normalize
from tests.fedssl.data.data_files import good_arrays, load_npz, refused, save
from tests.fedssl.data.image_samples import ramp, save_array


def test_normalize_uses_constants():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    torch.testing.assert_close(normalize(images).flatten(), torch.tensor([-2.0, -1.2, 2.0]))
    torch.testing.assert_close(normalize(images[0]), normalize(images)[0])
    with pytest.raises(TypeError, match=r"uint8.*float32"):
        normalize(torch.rand(2, 3, 8, 8))


def folder_of(tmp_path, pixels: np.ndarray, suffix: str, **options: object) -> DataOptions:
    for split in ("train", "test"):
        for number in range(2):
            save_array(tmp_path / split / "a" / f"{number}{suffix}", pixels)
    return DataOptions(name="folder", path=tmp_path, image_size=16, **options)


@pytest.mark.parametrize(
    ("dtype", "suffix", "low", "high"), [("u2", ".png", 300, 63300), ("i4", ".tiff", -1000, 2000), ("f4", ".tif", 0, 1)]
)
def test_deep_files_need_a_window_and_keep_their_grays(tmp_path, dtype, suffix, low, high):
    pixels = ramp(low, high, dtype)
    kind = "floats" if dtype == "f4" else "pixels of more than 8 bits"
    first = rf"train/a/0\{suffix} has {kind}, as 4 of 4 files have \(values {low:g} to {high:g}"
    full = r"data\.window=per_image" if dtype == "f4" else r"data\.window=full"
    refused(rf"{first}.*data\.window=\[{low:g},{high:g}\] [^,]*, or {full}", folder_of(tmp_path, pixels, suffix))
    images = load_dataset(folder_of(tmp_path, pixels, suffix, window=(low, high)), 0).train_images
    assert images.shape == (2, 1, 16, 16)
    wanted = np.rint((pixels.astype(float) - low) / (high - low) * 255)
    assert np.array_equal(images[0, 0].numpy(), wanted)
    by_image = load_dataset(folder_of(tmp_path, pixels, suffix, window="per_image"), 0).train_images
    assert np.array_equal(by_image[1, 0].numpy(), wanted)
    full = folder_of(tmp_path, pixels, suffix, window="full")
    if dtype == "f4":
        refused("no full range, as they are floats", full)
    else:
        limits = np.iinfo(dtype)
        share = (pixels.astype(float) - limits.min) / (float(limits.max) - limits.min)
        assert np.array_equal(load_dataset(full, 0).train_images[0, 0].numpy(), np.rint(share * 255))


def test_deep_colours_need_a_window_and_those_of_a_pixmap_are_not_read(tmp_path):
    options = folder_of(tmp_path, np.zeros((8, 8, 3), np.uint8), ".png")
    (tmp_path / "train" / "a" / "0.png").write_bytes(imagecodecs.png_encode(np.full((8, 8, 3), 0x8000, "u2")))
    refused(r"0\.png has pixels of more than 8 bits, as 1 of 4 files have \(values 32768 to 32768", options)
    for window, value in (("full", 0x80), ((0x7F00, 0x8100), 128)):
        images = load_dataset(options.model_copy(update={"window": window}), 0).train_images
        assert images[0].unique().tolist() == [value]
    (tmp_path / "train" / "a" / "0.ppm").write_bytes(b"P6 8 8 65535\n" + bytes(8 * 8 * 6))
    says = r"0\.ppm .*\(colours of 16 bits in a PPM, which are not read; store them as PNG or TIFF"
    refused(says, options.model_copy(update={"window": "full"}))


def test_a_window_leaves_8_bits_alone(tmp_path):
    options = folder_of(tmp_path, ramp(0, 255, "u1"), ".png")
    plain = load_dataset(options, 0).train_images
    assert plain.equal(load_dataset(options.model_copy(update={"window": (0, 4095)}), 0).train_images)
    path = save(tmp_path / "a.npz", **good_arrays())
    assert load_npz(path).train_images.equal(load_npz(path, window=(0, 4095)).train_images)


@pytest.mark.parametrize("dtype", ["u2", "i4", "f8"])
def test_npz_of_more_than_8_bits(tmp_path, dtype):
    arrays = good_arrays() | {
        "x_train": np.stack([ramp(100, 4000, dtype), ramp(100, 2000, dtype)] * 6),
        "x_test": np.stack([ramp(100, 1000, dtype)] * 5),
    }
    path = save(tmp_path / "a.npz", **arrays)
    says = r"x_train in .* has pixels from 100 to 4000; .*data\.window=\[100,4000\]"
    refused(says, DataOptions(name="npz", path=path))
    stated = load_npz(path, window=(100, 4000))
    wanted = np.rint((arrays["x_train"][:, None].astype(float) - 100) / 3900 * 255)
    assert np.array_equal(stated.train_images.numpy(), wanted)
    assert int(stated.test_images.max()) == round(900 / 3900 * 255)  # a dark test set stays dark
    by_image = load_npz(path, window="per_image")
    for images in (by_image.train_images, by_image.test_images):
        assert images.amax((1, 2, 3)).unique().tolist() == [255]  # also of the darker ones
        assert images.amin((1, 2, 3)).unique().tolist() == [0]
    if dtype[0] == "f":
        refused("no full range, as they are floats", DataOptions(name="npz", path=path, window="full"))
    else:
        limits = np.iinfo(dtype)
        brightest = round((4000 - int(limits.min)) / (int(limits.max) - int(limits.min)) * 255)
        assert int(load_npz(path, window="full").train_images.max()) == brightest


def test_public_images_have_the_same_rule(tmp_path):
    file = save_array(tmp_path / "public" / "a.png", ramp(0, 4095, "u2", 8))
    refused(r"a\.png has pixels of more than 8 bits", DataOptions(public_path=file.parent))
    public = load_dataset(DataOptions(public_path=file.parent, window=(0, 4095)), 0).public_images
    assert public[0, 0, 0].tolist() == np.rint(np.linspace(0, 4095, 8).astype("u2") / 4095 * 255).tolist()
    array = save(tmp_path / "p.npz", x=ramp(0, 4095, "u2", 8)[None])
    refused(r"x in .* from 0 to 4095", DataOptions(public_path=array))
    assert load_dataset(DataOptions(public_path=array, window=(0, 4095)), 0).public_images.equal(public)
