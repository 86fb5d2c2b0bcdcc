"""Datasets in folders of image files."""

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from tests.fedssl.data.data_files import refused, write_image


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
