"""Folders of images: flat or nested, without labels, with labels from folders or from a table."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedssl.data.datasets import Dataset, load_dataset
from fedssl.data.options import DataOptions
from fedssl.data.partitions import PartitionOptions, deal
from fedssl.data.summary import summarise
from fedssl.errors import UserError
from tests.fedssl.data.data_files import refused, write_image


def options_of(path: Path, **options: object) -> DataOptions:
    return DataOptions(name="images", path=path, image_size=8, **options)


def of_classes(path: Path, name: str) -> DataOptions:
    """A folder's classes by either of the two names of such data."""
    return options_of(path, labels="folders") if name == "images" else DataOptions(name=name, path=path, image_size=8)


def load(path: Path, **options: object) -> Dataset:
    return load_dataset(options_of(path, **options), 0)


def reds(data: Dataset) -> list[int]:
    """The first value of each training image, which tells the images apart."""
    return data.train_images[:, 0, 4, 4].tolist()


def test_a_flat_folder_without_labels(tmp_path, caplog):
    for number in range(12):
        write_image(tmp_path / f"{number:02}.png", 10 * number, size=(10 + number, 30 - number))
    data = load(tmp_path)
    assert data.train_images.shape == (12, 3, 8, 8)
    assert reds(data) == [10 * number for number in range(12)]
    assert data.train_labels.tolist() == [0] * 12
    assert not data.labelled
    assert data.test_images.shape == (0, 3, 8, 8)
    assert data.measured_images[:].equal(data.train_images)
    assert "resized" not in caplog.text
    assert load_dataset(DataOptions(name="images", path=tmp_path), 0).train_images.shape == (12, 3, 32, 32)
    assert "images are resized to 32 x 32 pixels; set data.image_size for another size" in caplog.text


def test_train_and_test_folders_are_the_splits(tmp_path, caplog):
    for name in ("train/1.png", "train/deep/2.png", "test/3.png"):
        write_image(tmp_path / name, 10 * int(Path(name).stem))
    data = load(tmp_path)
    assert reds(data) == [10, 20]
    assert data.test_images[:, 0, 4, 4].tolist() == [30]
    assert data.measured_images is data.test_images
    for name in ("val/4.tif", "val/x/y/5.webp"):
        write_image(tmp_path / name, 40)
    assert reds(load(tmp_path)) == [10, 20]
    assert len(load(tmp_path / "val").train_images) == 2
    assert "2 files are left out of" in caplog.text
    assert "val/4.tif, val/x/y/5.webp; images end with jpg" in caplog.text
    assert "each must be in train/ or test/" in caplog.text
    (table := tmp_path / "t.csv").write_text("file,label\ntrain/1.png,a\ntrain/deep/2.png,a\ntest/3.png,b\nval/4.tif,a")
    says = r"val/4\.tif cannot be read as an image \(only train/ and test/ are read\)"
    refused(says, options_of(tmp_path, labels=table))
    assert "each must be in train/ or test/ and on a line of the table" in caplog.text
    refused("train/ lacks: b; give train/ images of them", options_of(tmp_path, labels=table, broken="skip"))


def test_labels_from_folders_hold_out_a_stratified_test_set(tmp_path):
    for label, count in (("ant", 20), ("bee", 10), ("cow", 1)):
        for number in range(count):
            write_image(tmp_path / label / f"{number}.png", 5 * number + len(label))
    data = load(tmp_path, labels="folders")
    assert data.class_names == ("ant", "bee", "cow")
    assert data.train_labels.bincount().tolist() == [16, 8, 1]
    assert data.test_labels.bincount(minlength=3).tolist() == [4, 2, 0]
    other = load_dataset(options_of(tmp_path, labels="folders"), 1)
    assert other.test_images.equal(data.test_images)
    assert load(tmp_path, labels="folders", test_fraction=0.5).test_labels.bincount().tolist() == [10, 5]
    together = torch.cat((data.train_images, data.test_images))
    plain = load(tmp_path)
    assert sorted(i.numpy().tobytes() for i in together) == sorted(i.numpy().tobytes() for i in plain.train_images)


@pytest.mark.parametrize("name", ["images", "folder"])
def test_labels_from_folders_with_train_and_test(tmp_path, name):
    for file in ("train/bee/1", "train/bee/2", "train/ant/3", "train/cow/4", "test/cow/5", "test/ant/6"):
        write_image(tmp_path / f"{file}.png", 10 * int(file[-1]))
    options = of_classes(tmp_path, name)
    data = load_dataset(options, 0)
    assert data.train_images.shape == (4, 3, 8, 8)
    assert data.class_names == ("ant", "bee", "cow")
    assert data.train_labels.tolist() == [0, 1, 1, 2]
    assert reds(data) == [30, 10, 20, 40]
    assert data.test_labels.tolist() == [0, 2]  # numbered as in train/
    (tmp_path / "train" / "dog").mkdir()
    refused(r"train needs one folder of images a class, .*; without an image: dog", options)
    (tmp_path / "train" / "dog").rmdir()
    write_image(tmp_path / "test" / "dog" / "7.png", 1)
    refused(r"classes that train/ lacks: dog", options)


@pytest.mark.parametrize(("train", "test"), [("Train", "Test"), ("training", "TESTING"), ("train", "val")])
@pytest.mark.parametrize("name", ["images", "folder"])
def test_splits_in_any_usual_spelling_are_no_classes(tmp_path, caplog, name, train, test):
    for split, count in ((train, 3), (test, 2)):
        for number in range(count):
            write_image(tmp_path / split / "ab"[number % 2] / f"{number}.png", number)
    data = load_dataset(of_classes(tmp_path, name), 0)
    assert data.class_names == ("a", "b")
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([0, 0, 1], [0, 1])
    assert (f"the test images are those in {tmp_path / test}" in caplog.text) == (test != "test")
    found = summarise({"name": "images", "path": str(tmp_path), "labels": "folders"})
    assert (found.images, found.side) == (3, 32)
    write_image(tmp_path / "validation" / "a" / "1.png", 1)
    if test != "val":
        assert len(load_dataset(of_classes(tmp_path, name), 0).test_labels) == 2
    else:
        says = "holds val/ and validation/, which both mean its val images"
        refused(says, of_classes(tmp_path, name))
        with pytest.raises(UserError, match=says):
            summarise({"name": "images", "path": str(tmp_path)})


@pytest.mark.parametrize("folders", [["train"], ["Validation", "cat"], ["test", "val"]])
def test_one_split_without_another_is_no_class(tmp_path, folders):
    for folder in folders:
        for number in range(5):
            write_image(tmp_path / folder / "x" / f"{number}.png", number)
    refused(
        f"{tmp_path / folders[0]} has the name of a split, but .*: set data.path to that folder itself",
        options_of(tmp_path, labels="folders"),
    )
    assert len(load(tmp_path).train_images) == 5 * len(folders)
    assert summarise({"name": "images", "path": str(tmp_path)}).images == 5 * len(folders)


def test_public_images_of_a_nested_folder(tmp_path):
    for file in ("a/1.png", "public/deep/1.PNG", "public/2.jpeg"):
        write_image(tmp_path / file, 50, "L")
    (tmp_path / "public" / "notes.txt").write_text("not an image")
    public = load(tmp_path / "a", public_path=tmp_path / "public").public_images
    assert public.shape == (2, 1, 8, 8)
    assert public.unique().tolist() == [50]
    for name in ("3.png", "4.png"):  # in colour
        write_image(tmp_path / "public" / name, 30)
    assert load(tmp_path / "a", public_path=tmp_path / "public").public_images.shape == (4, 1, 8, 8)


def a_table(tmp_path: Path) -> Path:
    lines = ["site,file,label"]
    for number in range(10):
        write_image(tmp_path / "images" / "deep" / f"{number}.png", 20 * number)
        lines.append(f"{['York', 'Aachen', 'Bern'][number % 3]},deep/{number}.png,{[2, 10][number % 2]}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return tmp_path / "table.csv"


def test_labels_from_a_table(tmp_path):
    table = a_table(tmp_path)
    data = load(tmp_path / "images", labels=table)
    assert data.class_names == ("2", "10")  # by value, as they are numbers
    (tmp_path / "long.csv").write_text(table.read_text().replace(",10", ",1" + "0" * 5000))
    assert load(tmp_path / "images", labels=tmp_path / "long.csv").class_names == ("1" + "0" * 5000, "2")
    assert len(data.test_images) == 2
    assert [value // 20 % 2 for value in reds(data)] == data.train_labels.tolist()
    assert set(data.columns) == {"site", "file", "label"}
    assert [int(Path(name).stem) * 20 for name in data.columns["file"]] == reds(data)


FORMS: dict[str, Callable[[str, Path], bytes]] = {
    "BOM": lambda text, root: text.encode("utf-8-sig"),
    "CRLF": lambda text, root: text.replace("\n", "\r\n").encode(),
    "CR": lambda text, root: text.replace("\n", "\r").encode(),
    "semicolons": lambda text, root: text.replace(",", ";").replace("José", '"José').replace(".bmp", '.bmp"').encode(),
    "tabs": lambda text, root: text.replace(",", "\t").encode(),
    "spaces": lambda text, root: text.replace(",", " , ").replace("\n", "  \n").encode(),
    "empty lines": lambda text, root: text.replace("\n", "\n\n,\n").encode(),
    "absolute": lambda text, root: text.replace("Jos", f"{root}/Jos").encode(),
    "absolute by a link": lambda text, root: text.replace("Jos", f"{root.parent}/link/Jos").encode(),
    "backslashes": lambda text, root: text.replace("/", "\\").encode(),
    "dots": lambda text, root: text.replace("Jos", "./x/../Jos").encode(),
    "composed": lambda text, root: unicodedata.normalize("NFC", text).encode(),
    "decomposed": lambda text, root: unicodedata.normalize("NFD", text).encode(),
}


@pytest.mark.parametrize("on_disk", ["NFC", "NFD"])
@pytest.mark.parametrize("form", FORMS)
def test_a_table_of_any_form_names_the_same_files_and_classes(tmp_path, form, on_disk):
    root, text = tmp_path / "images", "file,größe\n"
    for number in range(8):
        name, label = f"José/{number}.bmp", ["é", "ü"][number % 2]
        text += f"{name},{label}\n"
        write_image(root / unicodedata.normalize(on_disk, name), 20 * number)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "table.csv").write_bytes(FORMS[form](text, root))
    column = unicodedata.normalize(on_disk, "größe")
    data = load(root, labels=tmp_path / "table.csv", label_column=column, test_fraction=0.4)
    assert data.class_names == ("é", "ü")
    assert [value // 20 % 2 for value in reds(data)] == data.train_labels.tolist()
    assert len(data.train_images) + len(data.test_images) == 8


def test_a_class_is_the_same_in_composed_and_decomposed_names(tmp_path):
    for form, split in (("NFC", "train"), ("NFD", "test")):
        for label in ("é", "ê", "z"):
            write_image(tmp_path / split / unicodedata.normalize(form, label) / "1.bmp", 10)
    data = load(tmp_path, labels="folders")
    assert data.class_names == ("z", "é", "ê")
    assert data.train_labels.tolist() == data.test_labels.tolist() == [0, 1, 2]


def test_files_that_differ_in_the_form_of_accents_alone_are_refused(tmp_path):
    for form in ("NFC", "NFD"):
        write_image(tmp_path / f"{unicodedata.normalize(form, 'é')}.bmp", 10)
    (tmp_path / "table.csv").write_text("file,label\né.bmp,1\n", encoding="utf-8")
    refused("differ in the form of accents alone", options_of(tmp_path, labels=tmp_path / "table.csv"))


def test_a_column_is_a_partition(tmp_path):
    table = a_table(tmp_path)
    data = load(tmp_path / "images", labels=table, label_column=None)
    assert not data.labelled
    by_site = PartitionOptions(name="column", column="site", clients=3)
    shares = [[reds(data)[row] // 20 % 3 for row in rows.tolist()] for rows in deal(data, by_site, 0)]
    assert [(set(share), len(share)) for share in shares] == [({1}, 3), ({2}, 3), ({0}, 4)]
    limited = load(tmp_path / "images", labels=table, train_limit=7, public_holdout=1)
    rows = deal(limited, by_site.model_copy(update={"min_samples": 1}), 0)
    assert sorted(torch.cat(rows).tolist()) == list(range(7))
    for client, client_rows in enumerate(rows):
        assert all(reds(limited)[row] // 20 % 3 == (client + 1) % 3 for row in client_rows.tolist())
    for changed, says in (
        ({"clients": 5}, r"column site has 3 values \(Aachen, Bern, York\), but partition\.clients is 5"),
        ({"column": "city"}, r"partition\.column=city is no column .*: its columns are site, file, label"),
        ({"min_samples": 4}, r"client 0 \(site Aachen\) has 3 images, fewer than partition\.min_samples=4"),
    ):
        with pytest.raises(UserError, match=says):
            deal(data, by_site.model_copy(update=changed), 0)
    with pytest.raises(UserError, match=r"no column of the images' table: there is no table"):
        deal(load(tmp_path / "images"), by_site, 0)


def test_several_folders_are_one_set_and_each_can_be_a_client(tmp_path, monkeypatch):
    for folder, count in (("north", 2), ("south/ward", 3), ("west", 4)):
        for number in range(count):
            write_image(tmp_path / folder / "ab"[number % 2] / f"{number}.png", 40 * count + number)
    more = [tmp_path / "south", tmp_path / "west/"]
    (tmp_path / "north" / "latest.png").symlink_to("a/0.png")  # within a folder an image may be there twice
    data = load(tmp_path / "north", more_paths=more)
    (tmp_path / "north" / "latest.png").unlink()
    assert len(data.train_images) == 10
    data = load(tmp_path / "north", more_paths=more)
    assert sorted(red // 40 for red in reds(data)) == [2, 2, 3, 3, 3, 4, 4, 4, 4]
    by_folder = PartitionOptions(name="column", column="folder", clients=3)
    assert [{reds(data)[row] // 40 for row in rows.tolist()} for rows in deal(data, by_folder, 0)] == [{2}, {3}, {4}]
    found = summarise({"name": "images", "path": str(tmp_path / "north"), "more_paths": list(map(str, more))})
    assert found.images == 9
    monkeypatch.chdir(tmp_path)
    labelled = load(Path("north"), more_paths=[tmp_path / "west"], labels="folders")
    assert labelled.class_names == ("a", "b")
    assert labelled.columns["folder"].count(str(tmp_path / "west")) == len(labelled.train_labels) - 2
    write_image(tmp_path / "split/train/0.png", 1)
    write_image(tmp_path / "split/test/0.png", 2)
    for folder, says in (
        ("nowhere", r"there is no folder .*nowhere; set data\.more_paths"),
        ("split", r"split holds train/ and test/, which data\.more_paths cannot join"),
        ("north/a", r"two of data\.path and data\.more_paths hold the same files: .*north/a/0\.png"),
    ):
        with pytest.raises(UserError, match=says):
            load(tmp_path / "north", more_paths=[tmp_path / folder])
    for wrong in (5, "south"):  # what the recipe's checks refuse
        assert summarise({"name": "images", "path": str(tmp_path / "north"), "more_paths": wrong}) is None
    with pytest.raises(ValueError, match=r"more_paths is for name=images"):
        DataOptions(name="npz", path=tmp_path / "a.npz", more_paths=[tmp_path])


NAMES = {
    "no ending": lambda name: name.removesuffix(".png"),
    "another ending": lambda name: name.replace(".png", ".PNG"),
    "another machine": lambda name: f"/home/else/scans/{name}",
    "Windows": lambda name: "D:\\scans\\" + name.replace("/", "\\"),
    "the folder's own name": lambda name: f"images/{name}",
    "no zeros": lambda name: name.replace("/0", "/").replace("/0", "/"),
    "no folder": lambda name: Path(name).name,
    "no folder, ending and zeros": lambda name: str(int(Path(name).stem)),
}


@pytest.mark.parametrize("form", NAMES)
def test_names_in_a_table_that_are_nearly_the_files_names_are_matched_where_one_file_alone_fits(form, tmp_path, caplog):
    """The files of two folders have other names, but for the forms that name the folder."""
    text, shift = "file,label\n", 0 if form in ("another machine", "Windows", "no zeros") else 4
    for number in range(8):
        name = f"{'ab'[number // 4]}/{number % 4 + shift * (number // 4):03}.png"
        text += f"{NAMES[form](name)},{['x', 'y'][number % 2]}\n"
        write_image(tmp_path / "images" / name, 20 * number)
    (tmp_path / "table.csv").write_text(text)
    data = load(tmp_path / "images", labels=tmp_path / "table.csv", test_fraction=0.4)
    assert [value // 20 % 2 for value in reds(data)] == data.train_labels.tolist()
    assert len(data.train_images) + len(data.test_images) == 8
    assert (
        "8 of the table's 8 names are not the files' names, and are taken for those that alone are like" in caplog.text
    )


def test_a_tables_names_of_other_files_are_said_to_be_so(tmp_path):
    for number in range(4):
        write_image(tmp_path / "images" / "ab"[number % 2] / f"{number // 2}.png", number)
    table = tmp_path / "table.csv"
    for names in (["0", "1"], ["scan7.png", "scan8.png"]):  # of two files each, or of none
        table.write_text("".join(["file,label\n", *(f"{name},x\n" for name in names)]))
        says = rf"the names in it are not the files' names: it has {names[0]} and .*images has a/0\.png; correct"
        refused(says, options_of(tmp_path / "images", labels=table))
    (tmp_path / "loop").symlink_to("loop")
    for name in ("c/1.png", f"{tmp_path}/loop/1.png"):  # which need not be b/1.png
        table.write_text(f"file,label\na/0.png,x\na/1.png,y\nb/0.png,x\n{name},y\n")
        says = r"/1\.png cannot be read as an image \(there is no such file\)"
        refused(says, options_of(tmp_path / "images", labels=table))


def test_files_and_table_that_do_not_agree(tmp_path, caplog):
    table = a_table(tmp_path)
    write_image(tmp_path / "images" / "extra.png", 1)
    (tmp_path / "images" / "gone.png").symlink_to("nowhere")
    (tmp_path / "images" / "table.csv").symlink_to(table)  # which is no image that is left out
    assert len(load(tmp_path / "images", labels=table).train_images) == 8
    assert "2 files are left out" in caplog.text
    assert "extra.png" in caplog.text
    assert "gone.png" in caplog.text
    assert "on a line of the table" in caplog.text
    (tmp_path / "images" / "deep" / "3.png").unlink()
    options = options_of(tmp_path / "images", labels=table)
    refused(r"deep/3\.png cannot be read as an image \(there is no such file\).*data\.broken=skip", options)
    data = load(tmp_path / "images", labels=table, broken="skip")
    assert len(data.train_images) + len(data.test_images) == 9


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", r"has the columns \(none\), but not file; set data\.file_column"),
        ("name,label\na.png,1\n", r"has the columns name, label, but not file; set data\.file_column"),
        ("file,class\na.png,1\n", r"but not label; set data\.label_column, or to null where the table has no labels"),
        ("file,label\n\n\n a.png\n", r"line 4 has 1 values, but the header has 2"),
        ('file,note,label\na.png,"two\nlines",1\n\nb.png,"x\n\ny", \n', r"line 7 has no label"),
        ("file,label\na.png,1\n,2\n", r"line 3 has no file; fill it in, or remove the line"),
        ("file;label;site\na.png;1\n", r"line 2 has 2 values, but the header has 3"),
        ("datei;label\na.png;1\n", r"has the columns datei;label, but not file"),
        ("file,label,label\na.png,1,1\n", r"several columns named label"),
        ("file,label\na.png,1\n./a.png,2\n", r"1 files on more than one line: a\.png"),
        ('file,label\n"a.png,1\n', r"cannot be read as a table"),
        ("file,label\n", r"table\.csv has no lines below its header; add one for each image"),
        (f"file,label\na.png,1\n{'x' * 300},1\n", r"x cannot be read as an image \(there is no such file\)"),
        (f"file,label\na.png,1\nb\\{'x' * 300},1\n", r"x cannot be read as an image \(there is no such file\)"),
        ("file,label\na.png,1\n/\0/b.png,1\n", r"b\.png cannot be read as an image \(there is no such file\)"),
        (b"\xff\xfe\x00", r"cannot be read as a table"),
        (None, r"there is no table .*table\.csv; set data\.labels"),
    ],
)
def test_bad_tables(tmp_path, content, says):
    write_image(tmp_path / "images" / "a.png", 1)
    table = tmp_path / "table.csv"
    if content is not None:
        table.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(says, options_of(tmp_path / "images", labels=table))


def test_bad_folders(tmp_path):
    refused(r"there is no folder .*gone; set data\.path", options_of(tmp_path / "gone"))
    refused(r"holds no image that can be used", options_of(tmp_path))
    refused(r"lacks train/ or test/; data\.path must hold", of_classes(tmp_path, "folder"))
    write_image(tmp_path / "a" / "1.png", 1)
    refused(r"data\.test_fraction=0\.2 leaves no test image of 1", options_of(tmp_path, labels="folders"))
    write_image(tmp_path / "test" / "a" / "1.png", 1)
    (tmp_path / "train").mkdir()
    refused(r"train holds no image that can be used", options_of(tmp_path))
    refused(r"train needs one folder of images a class", of_classes(tmp_path, "folder"))
