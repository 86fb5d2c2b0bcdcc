"""Images in a file are what they are in memory, are decoded once, and no half-written cache is ever read."""

import fcntl
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.data import stored_images
from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.options import DataOptions
from fedssl.data.stored_images import ChosenImages, Images, StoredImages, rows_in_place
from fedssl.data.summary import summarise
from fedssl.errors import UserError
from tests.fedssl.data.data_files import full_disk, random_pixels, refused
from tests.fedssl.data.image_samples import save_array


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Thirty images in colour; the cache is beside them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(30):
        save_array(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", random_pixels(20, 16, 3, seed=number))
    return tmp_path / "images"


def options_of(folder: Path, memory_limit: float | None = 0, **options: object) -> DataOptions:
    given = {"labels": "folders", "image_size": 16} | options
    return DataOptions(name="images", path=folder, memory_limit=memory_limit, **given)


def both(folder: Path, **options: object) -> tuple[Dataset, Dataset]:
    """The dataset in memory, and in a file."""
    in_memory, stored = (load_dataset(options_of(folder, limit, **options), 3) for limit in (None, 0))
    assert isinstance(in_memory.train_images, torch.Tensor)
    assert isinstance(stored.train_images, StoredImages)
    assert stored.train_labels.equal(in_memory.train_labels)
    return in_memory, stored


def decoded(folder: Path) -> Path:
    return folder.parent / "cache" / "fedssl" / "decoded"


def assert_same(ours: Images, expected: Images) -> None:
    """In every way in which images are taken."""
    count = len(expected)
    assert ours.shape == expected.shape
    some = torch.arange(count) % 3 == 0
    for index in (torch.tensor([3, 0, count - 1, 3]), slice(1, 3), slice(None), some, 2, torch.arange(0)):
        assert ours[index].equal(expected[index])
        assert ours[index].stride() == expected[index].stride()
        assert ours[index].dtype == torch.uint8
    for part, other in zip(ours.split(4), expected.split(4), strict=True):
        assert part.equal(other)


def test_both_ways_give_the_same_images_whole_and_with_a_holdout_and_limits(folder, caplog):
    memory, stored = both(folder)
    assert "decoding 30 images once, into" in caplog.text
    assert memory.train_images.shape == (24, 3, 16, 16)
    assert_same(stored.train_images, memory.train_images)
    assert_same(stored.test_images, memory.test_images)
    some = stored.train_images.of_rows(torch.tensor([9, 2, 4])).of_rows(slice(1, 3))
    assert some[:].equal(memory.train_images[torch.tensor([2, 4])])
    memory, stored = both(folder, public_holdout=5, train_limit=9, test_limit=3)
    assert stored.train_images[:].equal(memory.train_images)
    assert stored.test_images[:].equal(memory.test_images)
    assert isinstance(stored.public_images, torch.Tensor)
    assert stored.public_images.equal(memory.public_images)


def test_a_client_has_the_images_of_its_rows_and_copies_none_before_it_asks_for_it(folder):
    rows = torch.tensor([9, 2, 4, 9, 0])
    memory, stored = (data.train_images for data in both(folder))
    for images in (memory, stored):
        assert_same(rows_in_place(images, rows), memory[rows])
    chosen = rows_in_place(memory, rows)
    assert isinstance(chosen, ChosenImages)
    assert chosen.nbytes == memory[rows].nbytes
    memory[9] = 99
    assert (chosen[0] == 99).all()


def test_files_are_decoded_once(folder, monkeypatch):
    options = options_of(folder)
    first = load_dataset(options, 0)
    monkeypatch.setattr(stored_images, "read_pixels", None)  # whoever decodes fails
    monkeypatch.setattr(stored_images, "image_kind", None)
    again = load_dataset(options, 0)
    assert again.train_images[:].equal(first.train_images[:])
    for changed in ({"image_size": 8}, {"window": "full"}):
        with pytest.raises(TypeError):
            load_dataset(options.model_copy(update=changed), 0)


def test_a_file_that_changes_is_decoded_again(folder):
    options = options_of(folder)
    before = load_dataset(options, 0).train_images
    save_array(folder / "a" / "0.png", random_pixels(20, 16, 3, seed=99))
    os.utime(folder / "a" / "0.png", ns=(1, 1))
    after = load_dataset(options, 0).train_images
    assert not after[:].equal(before[:])
    assert before[:].equal(before[:])  # still open, and as it was


def test_a_cache_that_is_not_whole_is_not_read(folder):
    options = options_of(folder)
    wanted = load_dataset(options, 0).train_images[:]
    (pixels,), (description,) = (list(decoded(folder).glob(f"*.{suffix}")) for suffix in ("images", "json"))
    whole = pixels.read_bytes()
    left, written = (pixels.with_name(f"{name}.partial") for name in ("left", "written"))
    left.write_bytes(b"by a process that was killed")
    with open(written, "wb") as of_another_process:
        fcntl.flock(of_another_process, fcntl.LOCK_EX)
        of_another_process.write(b"half")
        of_another_process.flush()
        for damage in (
            lambda: pixels.write_bytes(pixels.read_bytes()[:-1]),
            lambda: description.write_text("{"),
            lambda: description.write_text("[]"),
            pixels.unlink,
            description.unlink,
        ):
            damage()
            assert load_dataset(options, 0).train_images[:].equal(wanted)
            assert pixels.read_bytes() == whole
    assert set(pixels.parent.iterdir()) == {pixels, description, written}


def test_a_run_survives_the_end_of_its_cache(folder, tmp_path):
    images = load_dataset(options_of(folder), 0).train_images
    (pixels,) = decoded(folder).glob("*.images")
    wanted = images[:]
    pixels.rename(tmp_path / "moved")
    assert images[:].equal(wanted)
    with open(tmp_path / "moved", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"has become shorter; delete it"):
        images[:]


def test_broken_files_are_remembered(folder, caplog):
    (folder / "a" / "4.png").write_bytes(b"")
    whole = (folder / "b" / "5.png").read_bytes()
    (folder / "b" / "5.png").write_bytes(whole[: len(whole) // 2])
    refused(r"2 of 30 files cannot be read as images", options_of(folder))
    assert list(decoded(folder).iterdir()) == []
    for _ in range(2):
        caplog.clear()
        memory, stored = both(folder, broken="skip")
        assert caplog.text.count("2 of 30 files cannot be read as images") == 2
        assert stored.train_images[:].equal(memory.train_images)
    refused(r"2 of 30 files cannot be read as images", options_of(folder))


@pytest.mark.parametrize(("most", "channels"), [((8, 8), 1), ((8, 8, 3), 3)])
def test_the_majority_decides_what_images_are_and_the_others_are_named(tmp_path, caplog, most, channels):
    for number in range(20):
        save_array(tmp_path / f"{number}.png", random_pixels(*most, seed=number))
    save_array(tmp_path / "logo.png", random_pixels(90, 80, *([3] if channels == 1 else []), seed=99))
    images = load_dataset(options_of(tmp_path, None, labels=None), 0).train_images
    assert images.shape == (21, channels, 16, 16)
    what = "in colour and become grey" if channels == 1 else "grey and become three equal channels"
    assert f"1 of 21 images are {what}, as most images are: {tmp_path}/logo.png" in caplog.text
    assert f"1 of 21 images are not of 8 x 8 pixels, as the others are: {tmp_path}/logo.png (80 x 90)" in caplog.text
    summary = summarise({"name": "images", "path": str(tmp_path)})
    assert (summary.channels, summary.side) == (channels, 8)


def test_grey_arrays_that_become_three_equal_channels_are_told(tmp_path, caplog):
    np.save(tmp_path / "a.npy", random_pixels(8, 8))
    images = load_dataset(options_of(tmp_path, None, labels=None, channels=3), 0).train_images
    assert images.shape[1] == 3
    says = "1 of 1 images are grey and become three equal channels, as data.channels or the training images say"
    assert f"{says}: {tmp_path}/a.npy" in caplog.text
    with open(tmp_path / "a.npy", "wb") as file:
        np.savez(file, x=random_pixels(8, 8))
    refused(r"a\.npy .*\(no array of numbers that numpy\.save", options_of(tmp_path, None, labels=None))


def test_images_that_are_there_twice_are_told(folder, caplog):
    load_dataset(options_of(folder, None), 0)
    assert "pixels of an earlier one" not in caplog.text
    (folder / "a" / "again.png").write_bytes((folder / "b" / "5.png").read_bytes())
    load_dataset(options_of(folder, None, labels=None), 0)
    pair = f"{folder}/a/again.png and {folder}/b/5.png"
    assert f"1 of 31 images have the pixels of an earlier one, such as {pair}: leave out" in caplog.text


def test_image_files_that_are_nearly_black_but_for_one_are_told(tmp_path, caplog):
    for number in range(3):
        save_array(tmp_path / f"{number}.png", random_pixels(8, 8, seed=number) % (2 if number else 255))
    load_dataset(options_of(tmp_path, None, labels=None), 0)
    assert f"the images in {tmp_path}: in most images all pixels are at most 2 of 255 apart" in caplog.text


def test_a_full_disk_leaves_nothing(folder, monkeypatch):
    with full_disk(5000):
        refused(r"no space left to write .*decoded", options_of(folder))
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("fedssl.data.stored_images.shutil.disk_usage", lambda path: usage)
    says = r"the decoded images need [\d.]+ kB in .*, where 1\.0 kB are free; free some space"
    refused(says, options_of(folder))
    assert list(decoded(folder).iterdir()) == []


def test_the_file_is_closed_and_rows_are_read_and_not_mapped(folder):
    """A limit on the address space would count a mapped file whole."""
    load_dataset(options_of(folder), 0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    images = load_dataset(options_of(folder), 0).train_images
    assert len(images[:])
    assert ".images" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del images
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_default_limit_is_a_share_of_the_memory_and_gray_images_take_a_third(folder, monkeypatch):
    for share, kind in ((1, StoredImages), (4, torch.Tensor)):
        monkeypatch.setattr(stored_images, "available_memory", lambda share=share: share * 30 * 3 * 16 * 16)
        assert isinstance(load_dataset(options_of(folder, None), 0).train_images, kind)
    for number in range(10):
        save_array(folder / "gray" / f"{number}.png", random_pixels(16, 16, seed=number))
    for limit, kind in ((0.0002, torch.Tensor), (0.00005, StoredImages)):  # 100 kB; in colour they were 300 kB
        images = load_dataset(options_of(folder / "gray", limit, labels=None, image_size=100), 0).train_images
        assert isinstance(images, kind)
        assert images.shape == (10, 1, 100, 100)
