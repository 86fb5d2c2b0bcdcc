"""Which files of a folder count as images, and how the user learns of the others."""

import os
from pathlib import Path

import pytest

from fedssl.data.datasets import load_dataset
from fedssl.data.files import list_files
from fedssl.data.options import DataOptions
from fedssl.data.summary import summarise
from fedssl.errors import UserError
from fedssl.tables.dry_run import training_data
from tests.fedssl.data.data_files import refused, write_image
from tests.fedssl.reports.synthetic_runs import evaluated, write_run


def a_folder(tmp_path: Path) -> DataOptions:
    for split in ("train", "test"):
        for name in ("ant", "bee"):
            write_image(tmp_path / split / name / "1.png", 50 + len(split) + 9 * (name == "ant"))
    return DataOptions(name="folder", path=tmp_path)


def test_files_that_are_left_out_are_named_but_what_programs_leave_behind_is_neither_class_nor_told(tmp_path, caplog):
    options = a_folder(tmp_path)
    for hidden in (".ipynb_checkpoints", "__MACOSX", ".git", "@eaDir"):
        write_image(tmp_path / "train" / hidden / "1.png", 1)
        write_image(tmp_path / "train" / "ant" / hidden / "1.png", 1)
    for name in (".DS_Store", "Thumbs.db", "._1.png"):
        (tmp_path / "train" / "ant" / name).write_bytes(b"x")
    data = load_dataset(options, 0)
    assert data.class_names == ("ant", "bee")
    assert data.train_labels.tolist() == [0, 1]
    assert caplog.text == ""
    for name in ("ant/notes.txt", "bee/photo.heic"):
        (tmp_path / "train" / name).touch()
    write_image(tmp_path / "train" / "loose.png", 1)
    load_dataset(options, 0)
    assert "fedssl: 3 files are left out of" in caplog.text
    assert "train/ant/notes.txt, train/bee/photo.heic, train/loose.png; images end with jpg," in caplog.text
    assert "dicom, and each must be in train/ or test/ and in the folder of its class" in caplog.text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(("scan.NII.gz", "save each slice"), ("scan.nii", "save each slice"), ("s.svs", "vips dzsave")),
        *(("p.HEIC", "magick mogrify"), ("v.mp4", "ffmpeg -i VIDEO"), ("all.zip", "unpack archives")),
        *(
            ("a.h5", "read arrays with h5py"),
            ("t.parquet", "save the image of each row"),
            ("a.npz", "name the .npz file"),
        ),
    ],
)
def test_files_that_are_no_images_are_named_with_what_makes_images_of_them(tmp_path, caplog, name, says):
    write_image(tmp_path / "images" / "1.png", 1)
    file = tmp_path / "images" / name
    file.write_bytes(b"content")
    load_dataset(DataOptions(name="images", path=tmp_path / "images"), 0)
    assert f"1 file is left out of {tmp_path}/images: {name}; images end with" in caplog.text
    assert caplog.text.count(says) == 1
    assert ("unpack" in caplog.text) == name.endswith(".zip")
    refused(rf"{name} is no folder; set data\.path to .*images; .*{says}", DataOptions(name="images", path=file))
    if name != "a.npz":
        refused(rf"{name} cannot be read as an \.npz file .*; .*{says}", DataOptions(name="npz", path=file))
    (tmp_path / "images" / "1.png").unlink()
    with pytest.raises(UserError, match=rf"holds no image; images end with .*{says}"):
        summarise({"name": "images", "path": str(tmp_path / "images")})


@pytest.mark.parametrize(
    ("images", "masks"), [("images", "masks"), ("train/Images", "train/Labels"), ("cat", "mask"), ("images/mask", "b")]
)
def test_a_folder_of_masks_beside_that_of_images_is_told(tmp_path, caplog, images, masks):
    for folder in (images, masks):
        write_image(tmp_path / folder / "1.png", len(folder))
    load_dataset(DataOptions(name="images", path=tmp_path), 0)
    told = f"{masks} in {tmp_path} has the name of masks, and its files count as images"
    assert (told in caplog.text) == ("images" in images.lower() and masks != "b")


def test_results_of_runs_are_no_images(tmp_path, caplog, tiny):
    """With data.path=. a run, its report, a table, an export and MLflow's folder lie among the images."""
    for name in ("cat/1.png", "dog/2.png", "dog/3.png", "dog/4.png"):
        write_image(tmp_path / name, 50)
    options = DataOptions(name="images", path=tmp_path, labels="folders", test_fraction=0.4)
    images, _ = list_files(tmp_path, follow_links=False)
    write_run(tmp_path / "runs" / "tiny-seed0", tiny(), evaluated(0, "knn", [40.0]))
    write_image(tmp_path / "runs" / "tiny-seed0" / "figures" / "neighbours.png", 50)
    write_image(tmp_path / "mlruns" / "0" / "map.png", 50)
    write_image(tmp_path / "runs" / "table" / "iid.png", 50)
    for name in ("runs/table/table.yaml", "runs/table/table.md", "encoder/config.json", "encoder/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    results = ["encoder", "mlruns", "runs/table", "runs/tiny-seed0"]
    left_out = [tmp_path / name for name in results]
    found = list_files(tmp_path, follow_links=False)
    assert (found[0], sorted(found[1])) == (images, left_out)
    data = load_dataset(options, 0)
    assert data.class_names == ("cat", "dog")
    assert len(data.train_images) + len(data.test_images) == 4
    assert f"results of runs are left out of {tmp_path}: encoder, mlruns, runs/" in caplog.text
    assert "files are left out" not in caplog.text
    assert training_data(options, 0, None).class_names == data.class_names
    write_image(tmp_path / "runs" / "5.png", 50)
    (tmp_path / "cow").mkdir()
    refused("without an image: cow$", options)


def test_links_are_followed_once_and_out_of_the_folder_only_if_that_is_asked_for(tmp_path):
    write_image(tmp_path / "elsewhere" / "1.png", 1)
    folder = tmp_path / "images"
    write_image(folder / "a" / "2.png", 1)
    (folder / "b.png").symlink_to(folder / "a" / "2.png")
    (folder / "circle").symlink_to(folder)
    (folder / "gone.png").symlink_to(tmp_path / "nothing")
    (folder / "notes.txt").symlink_to("/etc/hostname")  # which is not read
    (tmp_path / "link").symlink_to(folder)
    others = [folder / "gone.png", folder / "notes.txt"]
    for path in (folder, tmp_path / "link"):
        images, left_out = list_files(path, follow_links=False)
        assert [[file.relative_to(path).as_posix() for file in files] for files in (images, left_out)] == [
            ["b.png", "a/2.png"],
            ["gone.png", "notes.txt"],
        ]
    for link, target in (("c.png", "elsewhere/1.png"), ("d", "elsewhere")):
        (folder / link).symlink_to(tmp_path / target)
        with pytest.raises(UserError, match=rf"images/{link} is a link out of .*, to .*{target}: .*data\.follow_links"):
            list_files(folder, follow_links=False)
        (folder / link).unlink()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(folder)
    images = [folder / "b.png", folder / "a" / "2.png", folder / "linked" / "1.png"]
    assert list_files(folder, follow_links=True) == (images, others)
    for paths in ({"path": folder}, {"path": folder / "a", "public_path": folder}):
        refused("is a link out of", DataOptions(name="images", **paths))
        assert load_dataset(DataOptions(name="images", **paths, follow_links=True), 0)


def test_a_pipe_is_never_opened(tmp_path):
    options = a_folder(tmp_path)
    os.mkfifo(tmp_path / "train" / "ant" / "2.png")
    assert len(load_dataset(options, 0).train_images) == 2
    os.mkfifo(tmp_path / "data.npz")
    refused(r"data\.npz is a pipe or a device", DataOptions(name="npz", path=tmp_path / "data.npz"))
    refused(r"data\.npz is a pipe or a device", DataOptions(public_path=tmp_path / "data.npz"))
    refused(r"zero is a pipe or a device", DataOptions(name="npz", path="/dev/zero"))


def test_names_that_are_no_text_are_escaped(tmp_path):
    options = a_folder(tmp_path)
    for split in ("train", "test"):
        folder = os.path.join(os.fsencode(tmp_path / split), b"caf\xe9")
        os.mkdir(folder)
        write_image(tmp_path / split / "bee" / "1.png", 50)
        os.link(tmp_path / split / "bee" / "1.png", os.path.join(folder, b"1.png"))
        write_image(tmp_path / split / "two\nlines\x1b[31m" / "1.png", 50)
    names = load_dataset(options, 0).class_names
    assert names == ("ant", "bee", r"caf\udce9", r"two\nlines\x1b[31m")
    "".join(names).encode()  # can be stored
    (tmp_path / "test" / "ant" / "1.png").rename(tmp_path / "test" / "bee" / "\r2.png")
    refused(r"without an image: ant", options)
    (tmp_path / "test" / "bee" / "\r2.png").write_bytes(b"")
    (tmp_path / "test" / "ant").rmdir()
    refused(r"bee/\\r2\.png cannot be read", options)


@pytest.mark.parametrize("option", ["path", "public_path"])
def test_paths_that_cannot_be(option):
    for path, says in (
        ("~nosuchuser/x", r"'~nosuchuser/x' begins with an unknown user's home folder; write the path in full"),
        ("a\0b", r"a\\x00b cannot be opened: .*null byte"),
        ("a" * 300, r"cannot be opened: File name too long"),
        (Path(__file__) / "x", r"there is no file"),
    ):
        refused(says, DataOptions(name="npz", path=path) if option == "path" else DataOptions(public_path=path))
