"""Files made to break the reader of .npz files: each is refused with one line, and none is read whole."""

import io
import resource
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from tests.fedssl.data.data_files import good_arrays, refused, save


def npy(header: str, content: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A .npy file with a header of one's own."""
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(text)) + text + content


def described(shape: str, dtype: str = "|u1") -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"


def write_npz(path: Path, kind: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    """The good arrays with some members replaced by raw bytes."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, array in good_arrays().items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", members.get(name, content.getvalue()))
    return path


@pytest.mark.parametrize("key", ["x_train", "y_test"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (npy(described("(10000000, 1000, 1000)")), r"announces 10,000,000,000,000 bytes, but the file holds 0"),
        (npy(described("(10**30,)".replace("10**30", "1" + "0" * 30))), r"announces 10\^30 bytes"),
        (npy(described("(12, 6, 8)"), b"x"), r"announces 576 bytes, but the file holds 1;"),
        (npy(described("(2, 3)"), b"x" * 100), r"announces 6 bytes, but the file holds 100"),
        (npy(described("(-1, 6)")), r"invalid shape"),
        (npy(described("(True,)")), r"corrupt"),
        (npy(described("'abc'")), r"shape is not valid"),
        (npy(described("(1,)", "nothing")), r"not a valid dtype|is corrupt"),
        (npy("{'descr': '|u1'"), r"Cannot parse header|is corrupt"),
        (npy("[" * 5000), r"is corrupt"),
        (npy("{}" + " " * 30000), r"is corrupt"),
        (npy(described("(1,)"), b"x", (9, 9)), r"version"),
        (b"\x93NUMPY", r"is corrupt"),
        (b"", r"is corrupt"),
        (b"no array at all", r"is corrupt"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[10:60]),
)
def test_headers_that_lie(tmp_path, key, content, says):
    path = write_npz(tmp_path / "a.npz", **{key: content})
    refused(rf"{key} is corrupt.*{says}|{key} is corrupt.*({says})|{says}", DataOptions(name="npz", path=path))


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_damaged_compression(tmp_path, kind):
    path = write_npz(tmp_path / "a.npz", kind)
    options = DataOptions(name="npz", path=path)
    load_dataset(options, 0)
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("x_train.npy")
    begin = member.header_offset + 30 + len("x_train.npy")
    whole = path.read_bytes()
    for offset in (9, 20, member.compress_size // 2):  # after the header, whose bytes are not all used
        damaged = bytearray(whole)
        damaged[begin + offset : begin + offset + 3] = b"\xff\x00\xff"
        path.write_bytes(damaged)
        refused(r"x_train is corrupt", options)


def test_an_unknown_compression_is_refused(tmp_path):
    path = write_npz(tmp_path / "a.npz")
    content = path.read_bytes()
    local, central = content.index(b"PK\x03\x04") + 8, content.index(b"PK\x01\x02") + 10
    damaged = bytearray(content)
    damaged[local : local + 2] = damaged[central : central + 2] = b"\x63\x00"
    path.write_bytes(damaged)
    refused(r"x_train is corrupt", DataOptions(name="npz", path=path))


def test_a_file_that_unpacks_to_gigabytes_is_not_read(tmp_path, monkeypatch):
    """64 MB of zeros in some kB, read where 20 MB of memory are available."""
    zeros = np.zeros((16, 2048, 2048), np.uint8)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **(good_arrays() | {"x_train": zeros, "y_train": np.zeros(16, int)}))
    monkeypatch.setattr("fedssl.data.npz.available_memory", lambda: 20_000_000)
    tracemalloc.start()
    refused(
        r"the arrays take 67\.1 MB of memory \(x_train alone 67\.1 MB\), but only 20\.0 MB are available; store fewer",
        DataOptions(name="npz", path=path),
    )
    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    refused(r"the arrays take 67\.1 MB", DataOptions(public_path=save(tmp_path / "p.npz", x=zeros)))


def test_the_available_memory_heeds_the_address_space():
    from fedssl.data.stored_images import available_memory

    assert available_memory() > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 50_000_000, hard))
        assert 0 < available_memory() <= 50_000_000
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("shape", [(), (12,)])
@pytest.mark.parametrize("key", ["x_train", "x_test"])
def test_images_without_dimensions(tmp_path, key, shape):
    count = 12 if key == "x_train" else 5
    array = np.zeros(shape and (count,), np.uint8)
    path = save(tmp_path / "a.npz", **(good_arrays() | {key: array}))
    refused(rf"{key} in .* has shape \[.*\]; expected \[n, H, W\]", DataOptions(name="npz", path=path))


def test_labels_without_dimensions(tmp_path):
    path = save(tmp_path / "a.npz", **(good_arrays() | {"y_train": np.array(3)}))
    refused(r"y_train in .* has shape \[\]; expected", DataOptions(name="npz", path=path))


def test_a_public_array_without_dimensions(tmp_path):
    refused(r"x in .* has shape \[\]", DataOptions(public_path=save(tmp_path / "p.npz", x=np.array(3))))


def test_class_names_that_are_no_text_are_escaped(tmp_path):
    names = np.array(["a\nb", "\x1b[31m", "\udce9"])
    path = save(tmp_path / "a.npz", **good_arrays(), class_names=names)
    assert load_dataset(DataOptions(name="npz", path=path), 0).class_names == (r"a\nb", r"\x1b[31m", r"\udce9")
