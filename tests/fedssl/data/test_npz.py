"""Reading .npz files, and a one-line error for each way in which one can be wrong or made to do harm."""

import io
import pickle
import re
import resource
import struct
import tracemalloc
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.data.options import DataOptions
from fedssl.data.stored_images import available_memory
from tests.fedssl.data.data_files import good_arrays, load_npz, random_pixels, refused, save


def of(path: Path | str) -> DataOptions:
    return DataOptions(name="npz", path=path)


def test_npz_of_both_kinds(tmp_path):
    arrays = good_arrays()
    plain = load_npz(save(tmp_path / "a.npz", **arrays, class_names=np.array(["cat", "dog", "owl"])))
    assert plain.train_images.shape == (12, 3, 6, 8)
    assert plain.train_images.is_contiguous()
    assert np.array_equal(plain.train_images.permute(0, 2, 3, 1).numpy(), arrays["x_train"])
    assert plain.train_labels.tolist() == arrays["y_train"].tolist()
    assert plain.class_names == ("cat", "dog", "owl")
    of_medmnist = {
        "train_images": arrays["x_train"],
        "train_labels": arrays["y_train"][:, None].astype(np.uint8),
        "val_images": arrays["x_test"],
        "test_images": arrays["x_test"],
        "test_labels": arrays["y_test"][:, None].astype(np.uint8),
    }
    medmnist = load_npz(save(tmp_path / "b.npz", **of_medmnist))
    assert torch.equal(medmnist.train_images, plain.train_images)
    assert torch.equal(medmnist.test_labels, plain.test_labels)
    assert medmnist.test_labels.dtype == torch.int64
    assert medmnist.class_names == ("0", "1", "2")


def test_masks_of_0_and_1(tmp_path, caplog):
    """As type bool they are black and white; as numbers they are pixels of 255, and nothing is guessed."""
    mask = random_pixels(4, 6, 8) % 2
    assert load_npz(save(tmp_path / "a.npz", x=mask == 1)).train_images.unique().tolist() == [0, 255]
    assert caplog.text == ""
    assert load_npz(save(tmp_path / "b.npz", x=mask)).train_images.unique().tolist() == [0, 1]
    assert "or where they have 8 bits spread them over 0 to 255; in arrays, pixels of 0 and 1 need" in caplog.text


@pytest.mark.parametrize("most", [1.0000001, 1.05])
def test_floats_that_resizing_has_brought_somewhat_above_1_are_those_of_0_to_1(tmp_path, caplog, most):
    x_train, x_test = np.random.default_rng(0).random((2, 6, 8, 8))
    x_train[3, 2, 2], y = most, np.zeros(6, int)
    images = load_npz(save(tmp_path / "a.npz", x_train=x_train, x_test=x_test, y_train=y, y_test=y))
    for found, wanted in ((images.train_images, x_train), (images.test_images, x_test)):
        assert np.array_equal(found[:, 0], np.rint(np.minimum(wanted, 1) * 255))
    assert re.search(r"1 of 768 values are above 1, up to 1\.0[05]\d*, and count as 1: x_train in", caplog.text)


def test_floats_of_neither_range_are_refused_and_those_of_a_dark_set_are_told(tmp_path, caplog):
    x = np.random.default_rng(0).random((6, 8, 8))
    x[3, 2, 2] = 200.0
    says = r"x in .* has floats up to 200, but most of those above 0 are at most 1; expected floats in \[0, 1\] or in"
    refused(says, DataOptions(name="npz", path=save(tmp_path / "a.npz", x=x)))
    sparse = np.zeros((6, 8, 8))
    sparse[np.arange(6), 1, np.arange(6)] = 200.0
    assert load_npz(save(tmp_path / "b.npz", x=sparse)).train_images.unique().tolist() == [0, 200]
    assert caplog.text == ""
    load_npz(save(tmp_path / "c.npz", x=1 + x))
    assert ": in most images all pixels are at most 2 of 255 apart, from which nothing can be learned" in caplog.text


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ">f4", "i8"])
def test_pixel_types(tmp_path, dtype):
    """Dark test images have the scale of the training images: ones beside floats up to 255 are nearly black."""
    arrays = good_arrays()
    wanted = load_npz(save(tmp_path / "a.npz", **arrays))
    for scale in (1, 255) if dtype != "i8" else (1,):
        scaled = {key: (array / scale).astype(dtype) if key[0] == "x" else array for key, array in arrays.items()}
        assert torch.equal(load_npz(save(tmp_path / "b.npz", **scaled)).train_images, wanted.train_images)
    dark = arrays | {"x_train": arrays["x_train"].astype(dtype), "x_test": np.ones((5, 6, 8, 3), dtype)}
    assert load_npz(save(tmp_path / "c.npz", **dark)).test_images.unique().tolist() == [1]


def test_class_names_are_escaped_where_they_are_no_text_and_composed(tmp_path):
    names = np.array(["a\nb", "\x1b[31m", "\udce9", unicodedata.normalize("NFD", "é")])
    loaded = load_npz(save(tmp_path / "a.npz", **good_arrays(), class_names=names))
    assert loaded.class_names == (r"a\nb", r"\x1b[31m", r"\udce9", "é")


SEVERAL = random_pixels(12, 4) % 2  # labels an image


def spoiled_pixels(value: float, count: int) -> np.ndarray:
    pixels = np.zeros((5, 6, 8, 3), np.float32)
    pixels.reshape(-1)[:count] = value
    return pixels


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x_test": spoiled_pixels(np.nan, 4)}, r"x_test in .* 4 pixels that are NaN or infinite"),
        ({"x_test": spoiled_pixels(-0.5, 1)}, r"x_test in .* from -0\.5 to 0"),
        ({"x_test": spoiled_pixels(256, 1)}, r"from 0 to 256"),
        ({"x_train": random_pixels(11, 6, 8, 3)}, r"x_train has 11 images but y_train has 12 labels"),
        ({"y_test": np.arange(4)}, r"x_test has 5 images but y_test has 4 labels"),
        ({"x_test": random_pixels(0, 6, 8, 3), "y_test": np.zeros(0, int)}, r"y_test in .* is empty"),
        ({"x_train": random_pixels(12, 0, 8, 3)}, r"x_train in .* is empty \(shape \[12, 0, 8, 3\]\)"),
        ({"y_train": np.arange(12) - 1}, r"y_train in .* 1 negative labels"),
        ({"y_train": np.arange(12) / 2}, r"y_train in .* type float64; labels must be integers"),
        ({"y_train": np.where(np.arange(12) > 9, np.nan, 1)}, r"y_train in .* and 2 labels that are NaN; .*leave out"),
        ({"y_train": np.array(["cat", "dog"] * 6)}, r"y_train in .* labels by numpy\.unique\(labels, return_inv"),
        ({"y_train": np.eye(12, dtype=int)}, r"y_train in .* shape \[12, 12\]"),
        ({"y_train": np.array(3)}, r"y_train in .* has shape \[\]; expected"),
        ({"y_train": np.arange(12) * 10**9}, r"renumber the classes"),
        ({"x_train": np.array(["a"] * 12)}, r"x_train in .* type <U1"),
        ({"x_train": random_pixels(12, 48)}, r"x_train in .* shape \[12, 48\]"),
        ({"x_test": np.array(3)}, r"x_test in .* has shape \[\]; expected \[n, H, W\]"),
        ({"x_train": random_pixels(12, 6, 8, 4)}, r"training images are 4x6x8 but test images are 3x6x8"),
        ({"x_test": random_pixels(5, 8, 8, 3)}, r"training images are 3x6x8 but test images are 3x8x8"),
        (
            {"y_train": SEVERAL, "y_test": random_pixels(5, 3) % 2},
            r"y_test in .* has 3 columns but y_train has 4; expected",
        ),
        ({"y_train": SEVERAL, "y_test": SEVERAL[:4]}, r"x_test has 5 images but y_test has 4 labels"),
        (
            {"y_train": SEVERAL, "y_test": random_pixels(5, 4)},
            r"y_train in .* shape \[12, 4\]; expected \[n\] or \[n, 1\]",
        ),
        (
            {"y_test": None} | {f"key{i}": np.zeros(1) for i in range(17)},
            r"arrays x_train, y_train, x_test, .*and 10 more; expected x_train, .* or train_images,",
        ),
        ({"class_names": np.array(["cat", "dog"])}, r"class_names has shape \[2\] but the labels reach 2"),
    ],
)
def test_bad_contents(tmp_path, change, says):
    arrays = {key: array for key, array in (good_arrays() | change).items() if array is not None}
    refused(says, of(save(tmp_path / "bad.npz", **arrays)))


ONE_HOT = {f"y_{part}": np.eye(3, dtype=int)[np.arange(count) % 3] for part, count in (("train", 12), ("test", 5))}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y_train": 1 + np.arange(12) % 2}, "no training image is of the class 0: number classes 0, 1, 2"),
        ({"y_train": np.arange(12) % 2 * 3}, "no training image is of the class 1, 2: "),
        ({"class_names": ["Circle", "dog", "circle "]}, "'Circle' and 'circle ' differ in capitals or spaces"),
        ({"class_names": np.array(["a", "NaN", "b"])}, "NaN counts as a class: leave such images out"),
        ({"y_test": np.ones(5, int)}, "all test images are of one class, so that no accuracy and no AUROC"),
        ({"y_train": np.ones(12, int), "y_test": np.ones(5, int)}, "all training and all test images are of one class"),
        (ONE_HOT, "each image has exactly one of several labels: save labels.argmax(1)"),
        ({"x_test": good_arrays()["x_train"][7:]}, "5 of 17 images have the pixels of an earlier one, such as x_t"),
    ],
)
def test_odd_labels_and_copies_are_told(tmp_path, caplog, change, says):
    load_npz(save(tmp_path / "good.npz", **good_arrays()))
    assert caplog.text == ""
    load_npz(save(tmp_path / "odd.npz", **(good_arrays() | change)))
    assert f"fedssl: {says}" in caplog.text


def test_missing_and_unreadable_files(tmp_path):
    whole = save(tmp_path / "whole.npz", **good_arrays()).read_bytes()
    flipped = bytearray(whole)
    flipped[500] ^= 255  # inside the first array's pixels: the archive's checksum tells
    unknown = bytearray(whole)  # a compression
    for place in (whole.index(b"PK\x03\x04") + 8, whole.index(b"PK\x01\x02") + 10):
        unknown[place : place + 2] = b"\x63\x00"
    npy = io.BytesIO()
    np.save(npy, np.zeros(3))
    for name, content, says in (
        ("text.npz", b"no archive", r"text\.npz cannot be read as an \.npz"),
        ("empty.npz", b"", r"empty\.npz cannot be read"),
        ("single.npy", npy.getvalue(), r"x in .*single\.npy has shape \[3\]"),
        ("cut.npz", whole[: len(whole) // 2], r"cut\.npz cannot be read"),
        ("flipped.npz", flipped, r"x_train is corrupt"),
        ("unknown.npz", unknown, r"x_train is corrupt"),
    ):
        (tmp_path / name).write_bytes(content)
        refused(says, of(tmp_path / name))
    refused(r"no file .*nothing\.npz; set data\.path", of(tmp_path / "nothing.npz"))
    refused(r"is a folder.*data\.name=images", of(tmp_path))


# Files that are made to do harm


def test_pickles_are_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "trap.npz").write_bytes(pickle.dumps(Trap()))
    refused("cannot be read", of(tmp_path / "trap.npz"))
    refused("object array", of(save(tmp_path / "inner.npz", **(good_arrays() | {"x_train": np.array([Trap()] * 12)}))))
    refused("object array", DataOptions(public_path=save(tmp_path / "public.npz", x=np.array([Trap()]))))
    assert not (tmp_path / "sprung").exists()


def npy(header: str, content: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A .npy file with a header of one's own."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(text)) + text + content


def described(shape: str, dtype: str = "|u1") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"


def write_npz(path: Path, **members: bytes) -> Path:
    """The good arrays with some members replaced by raw bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in good_arrays().items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", members.get(name, content.getvalue()))
    return path


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (npy(described("(10000000, 1000, 1000)")), r"announces 10,000,000,000,000 bytes, but the file holds 0"),
        (npy(described(f"({10**30},)")), r"announces 10\^30 bytes"),
        (npy(described("(12, 6, 8)"), b"x"), r"announces 576 bytes, but the file holds 1;"),
        (npy(described("(2, 3)"), b"x" * 100), r"announces 6 bytes, but the file holds 100"),
        (npy(described("(-1, 6)")), r"invalid shape"),
        (npy(described("'abc'")), r"shape is not valid"),
        (npy(described("(1,)", "nothing")), r"corrupt"),
        (npy("{'descr': '|u1'"), r"corrupt"),
        (npy("[" * 5000), r"corrupt"),
        (npy(described("(1,)"), b"x", (9, 9)), r"corrupt"),
        (b"", r"corrupt"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[10:60]),
)
def test_headers_that_lie(tmp_path, content, says):
    for key in ("x_train", "y_test"):
        refused(rf"{key} is corrupt.*{says}|{key} is {says}", of(write_npz(tmp_path / "a.npz", **{key: content})))


def test_a_file_that_unpacks_to_gigabytes_is_not_read(tmp_path, monkeypatch):
    """16 MB of zeros in some kB, read where 5 MB of memory are available."""
    zeros = np.zeros((16, 1024, 1024), np.uint8)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **(good_arrays() | {"x_train": zeros, "y_train": np.zeros(16, int)}))
    monkeypatch.setattr("fedssl.data.npz.available_memory", lambda: 5_000_000)
    tracemalloc.start()
    says = r"arrays take 16\.8 MB of memory \(x_train alone 16\.8 MB\), but only 5\.0 MB are available; store fewer"
    refused(says, of(path))
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    refused(r"the arrays take 16\.8 MB", DataOptions(public_path=save(tmp_path / "p.npz", x=zeros)))


def test_the_available_memory_heeds_the_address_space():
    assert available_memory() > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000, hard))
        assert 0 < available_memory() <= 50_000_000
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
