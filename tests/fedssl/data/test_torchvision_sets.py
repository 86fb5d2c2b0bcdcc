"""torchvision's sets, from files that are written as theirs are."""

import hashlib
import pickle
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
from torchvision import datasets as torchvision_datasets

from fedssl.data.datasets import load_dataset
from fedssl.data.options import SOURCES, DataOptions, DataSource
from tests.fedssl.data.data_files import random_pixels, refused


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


def test_another_set_is_one_entry_of_the_table(tmp_path, monkeypatch):
    images = random_pixels(32, 32, 3, 4)
    files = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        scipy.io.savemat(path, {"X": images, "y": np.array([[1], [10], [3], [9]], np.uint8)})
        files[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision_datasets.SVHN, "split_list", files)
    splits = ({"split": "train"}, {"split": "test"})
    entry = DataSource("datasets:load_torchvision_set", 73_257, 10, (3, 32, 32), "SVHN", splits)
    monkeypatch.setitem(SOURCES, "svhn", entry)
    svhn = load_dataset(DataOptions(name="cifar10", path=tmp_path).model_copy(update={"name": "svhn"}), 0)
    assert np.array_equal(svhn.train_images.numpy(), images.transpose(3, 2, 0, 1))
    assert svhn.train_labels.tolist() == svhn.test_labels.tolist() == [1, 0, 3, 9]
    assert svhn.class_names == tuple("0123456789")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_missing_torchvision_sets(tmp_path, name):
    refused(rf"{name} is not complete under .*; set data\.download=true", DataOptions(name=name, path=tmp_path))


def test_failed_download(tmp_path, monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torchvision_datasets, "CIFAR10", fail)
    options = DataOptions(name="cifar10", path=tmp_path, download=True)
    refused(r"cifar10 could not be downloaded to .*no network", options)
