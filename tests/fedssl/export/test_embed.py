"""Features of images: those that the run's own model gives, in the images' order and under their names."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

from fedssl.errors import UserError
from fedssl.evaluation.features import extract_features
from fedssl.export.embed import embed_images
from fedssl.export.encoder_folder import export_encoder, read_encoder
from fedssl.export.trained_encoder import TrainedEncoder
from fedssl.models.encoders import PatchFeatures
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.export.finished_runs import features_of_run, finished_run


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An exported encoder of grey 8x8 images, its run's folder and federation."""
    folder = tmp_path_factory.mktemp("exported")
    run, federation = finished_run(folder)
    return export_encoder(run, folder / "encoder"), run, federation


@pytest.fixture
def embedded(exported, tmp_path, monkeypatch):
    """Embeds images, so many at a time; gives the features, the files' names, and what was left out."""

    def embed(images, at_a_time=256, **options):
        monkeypatch.setattr("fedssl.export.embed._AT_A_TIME", at_a_time)
        left_out = embed_images(exported[0], images, tmp_path / "out.npz", **options)
        with np.load(tmp_path / "out.npz") as arrays:
            return torch.from_numpy(arrays["features"]), arrays["files"].tolist(), left_out

    return embed


def test_a_nested_folder_gives_the_runs_features_by_file(exported, embedded, tmp_path):
    _, run, federation = exported
    pixels = federation.dataset.test_images[:5]
    names = ["a/2.png", "a/10.png", "b/c/1.png", "0.png", "z.PNG"]
    for name, image in zip(names, pixels, strict=True):
        save_array(tmp_path / "images" / name, image[0].numpy())
    (tmp_path / "images" / "notes.txt").write_text("no image")
    expected = features_of_run(run, federation, pixels)
    for size in (2, 256):
        features, files, left_out = embedded(tmp_path / "images", at_a_time=size)
        assert (files, left_out) == (sorted(names), "")
        order = [names.index(name) for name in files]
        torch.testing.assert_close(features, expected[order], rtol=0, atol=1e-5)


def test_every_array_of_an_npz_file_is_embedded(exported, embedded, tmp_path):
    _, run, federation = exported
    train, test = federation.dataset.train_images[:3], federation.dataset.test_images
    np.savez(tmp_path / "images.npz", x_test=test[:, 0].numpy(), x_train=train[:, 0].numpy(), y_train=[0] * 3)
    features, files, _ = embedded(tmp_path / "images.npz", at_a_time=2)
    assert files[:4] == ["x_train/0", "x_train/1", "x_train/2", "x_test/0"]
    expected = features_of_run(run, federation, torch.cat([train, test]))
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)


def test_a_table_of_several_folders_holds_what_the_arrays_hold(exported, embedded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels, sources = exported[2].dataset.test_images[:3], [Path("one, two"), Path("two"), Path("two.npz")]
    for source, image in zip(sources[:2], pixels, strict=False):
        save_array(source / "0.png", image[0].numpy())
    np.savez("two.npz", x=pixels[2:, 0].numpy())
    features, files, _ = embedded(sources)
    assert files == ["one, two/0.png", "two/0.png", "two.npz/x/0"]
    torch.testing.assert_close(features, features_of_run(*exported[1:], pixels), rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="given twice"):
        embedded([Path("two"), tmp_path / "two"])
    embed_images(exported[0], sources, tmp_path / "table.csv")
    header, *rows = csv.reader((tmp_path / "table.csv").read_text().splitlines())
    assert header == ["file", *(f"feature_{i}" for i in range(features.shape[1]))]
    assert [row[0] for row in rows] == files
    assert (np.array([row[1:] for row in rows]).astype(np.float32) == features.numpy()).all()


def test_the_names_in_a_table_are_the_files_names(exported, tmp_path):
    """Whatever a spreadsheet would compute: another table is joined by these names."""
    names = ["+1+1.png", "-1.png", "=a.png", "@b.png"]
    for name in names:
        save_array(tmp_path / "images" / name, np.zeros((8, 8), np.uint8))
    embed_images(exported[0], tmp_path / "images", tmp_path / "table.csv")
    assert [row["file"] for row in csv.DictReader((tmp_path / "table.csv").open())] == names


def test_an_output_that_cannot_be_written_is_refused_before_an_image_is_read(exported, tmp_path, monkeypatch):
    save_array(tmp_path / "images" / "1.png", np.zeros((8, 8), np.uint8))
    (tmp_path / "file").touch()
    monkeypatch.setattr("fedssl.export.embed.extract_outputs", lambda *_: pytest.fail("an image was embedded"))
    monkeypatch.setattr("fedssl.export.encoder_folder.encoder_of_run", lambda *_: pytest.fail("a run was read"))
    for output, says in (
        (tmp_path / "images", r"images is a folder: name the file to write, such as \S+images/FILE"),
        (tmp_path / "file" / "a.npz", "file/a.npz cannot be written: Not a directory"),
        (Path("/proc/a/b.npz"), "/proc/a/b.npz cannot be written"),
    ):
        with pytest.raises(UserError, match=says):
            embed_images(exported[0], tmp_path / "images", output)
        if output.suffix:
            with pytest.raises(UserError, match="cannot be written"):
                export_encoder(exported[1], output)
    with pytest.raises(UserError, match=r"a\.parquet: features are written as \.npz, or as \.csv"):
        embed_images(exported[0], tmp_path / "images", tmp_path / "a.parquet")


def test_colour_and_other_sizes_are_brought_to_the_encoders_form(exported, embedded, tmp_path, recwarn):
    _, run, federation = exported
    grey = federation.dataset.test_images[:1]
    large = grey[0, 0].repeat_interleave(4, dim=0).repeat_interleave(4, dim=1).numpy()
    save_array(tmp_path / "images" / "tall.png", np.asarray(Image.fromarray(large).resize((32, 64))))
    save_array(tmp_path / "images" / "colour.png", np.stack([large] * 3, axis=2))
    Image.fromarray(large).convert("P").save(tmp_path / "images" / "palette.png", transparency=bytes(256))
    features, files, _ = embedded(tmp_path / "images")
    assert files == ["colour.png", "palette.png", "tall.png"]
    assert not [one for one in recwarn if "Transparency" in str(one.message)]
    assert torch.cosine_similarity(features[:1], features_of_run(run, federation, grey)) > 0.9


def test_deep_pixels_are_read_through_the_window_that_is_given(exported, embedded, tmp_path):
    _, run, federation = exported
    pixels = federation.dataset.test_images[:2]
    for number, image in enumerate(pixels):
        save_array(tmp_path / "deep" / f"{number}.png", image[0].numpy().astype("u2") * 257)
    for window, says in (
        (None, r"0\.png has pixels of more than 8 bits, .*: give --window LOW,HIGH"),
        ("file", r"none of the 2 files .*0\.png \(these pixels have no window .*; set --window \[LOW,HIGH\]\)"),
    ):
        with pytest.raises(UserError, match=says):
            embedded(tmp_path / "deep", window=window)
    features, *_ = embedded(tmp_path / "deep", window=(0, 65535))
    torch.testing.assert_close(features, features_of_run(run, federation, pixels), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "module", "grid"),
    [("small_convnet", "blocks", 2), ("small_vit", "norm", 4), ("small_resnet10", "layer4", 1)],
)
def test_features_of_patches_are_what_the_network_pools(architecture, module, grid, tmp_path):
    run, federation = finished_run(tmp_path, architectures=[architecture])
    folder, pixels = export_encoder(run, tmp_path / "encoder"), federation.dataset.test_images
    np.savez(tmp_path / "images.npz", x=pixels[:, 0].numpy())
    embed_images(folder, tmp_path / "images.npz", tmp_path / "out.npz", patches=True)
    features = torch.from_numpy(np.load(tmp_path / "out.npz")["features"])
    outputs, network = [], read_encoder(folder).network
    network.get_submodule(module).register_forward_hook(lambda module, inputs, output: outputs.append(output))
    extract_features(network, pixels)
    last = outputs[0]
    expected = last[:, 1:].unflatten(1, (grid, grid)) if last.dim() == 3 else last.movedim(1, 3)
    assert features.shape == (20, grid, grid, network.num_features)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"table\.csv: a row of a table cannot hold .* name a \.npz file"):
        embed_images(folder, tmp_path / "images.npz", tmp_path / "table.csv", patches=True)


def test_features_of_patches_lie_where_the_patches_lie():
    """Each of a transformer without layers depends on its patch alone; swin's are in the order of a grid already."""
    network = VisionTransformer((8, 12), 4, in_chans=1, embed_dim=8, depth=0, num_heads=1, reg_tokens=2, num_classes=0)
    images = torch.zeros(2, 1, 8, 12)
    images[1, :, 4:, 8:] = 1
    first, second = PatchFeatures(network.eval())(images)
    assert (first != second).any(dim=2).tolist() == [[False, False, False], [False, False, True]]
    sizes = {"window_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1), "num_classes": 0}
    swin = SwinTransformer((16, 32), 4, 1, **sizes).eval()
    images = torch.rand(2, 1, 16, 32)
    assert torch.equal(PatchFeatures(swin)(images).mean(dim=(1, 2)), swin(images))
    assert PatchFeatures(swin)(images).shape == (2, 2, 4, 16)


def test_an_encoder_whose_last_features_are_no_known_grid_is_refused(exported, tmp_path, monkeypatch):
    mixer = MlpMixer(num_classes=0, img_size=8, in_chans=1, patch_size=4, num_blocks=1, embed_dim=8)
    encoder = TrainedEncoder(mixer, "mixer", (1, 8, 8))
    monkeypatch.setattr("fedssl.export.embed.read_encoder", lambda folder: encoder)
    with pytest.raises(UserError, match=r"the last features of mixer are in no known form of a grid .*leave --patches"):
        embed_images(exported[0], tmp_path, tmp_path / "out.npz", patches=True)


def test_broken_files_are_all_named_and_refused_or_left_out(embedded, tmp_path):
    folder = tmp_path / "images"
    for name in ("1.png", "2.png", "3.png"):
        save_array(folder / name, np.zeros((8, 8), np.uint8))
    (folder / "2.png").write_bytes(b"not an image")
    (folder / "empty.jpg").write_bytes(b"")
    says = r"2 of 4 files cannot be read: \S*2\.png \(.*\), \S*empty\.jpg \([^)]*\); repair .*--skip-broken"
    with pytest.raises(UserError, match=says):
        embedded(folder, at_a_time=1)
    assert not (tmp_path / "out.npz").exists()
    features, files, left_out = embedded(folder, at_a_time=2, skip_broken=True)
    assert "2.png" in left_out
    assert "empty.jpg" in left_out
    assert files == ["1.png", "3.png"]
    assert len(features) == 2
    for name in files:
        (folder / name).unlink()
    with pytest.raises(UserError, match="none of the 2 files"):
        embedded(folder)


def test_what_cannot_be_embedded_is_said(exported, tmp_path):
    encoder, run, _ = exported
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    np.savez(tmp_path / "deep.npz", x=np.full((2, 8, 8), 4095, np.uint16))
    for folder, images, says in (
        (encoder, "empty", "holds no image"),
        (encoder, "loop", "loop cannot be opened: Too many levels of symbolic links"),
        (encoder, "nothing", "there is no folder or file"),
        (encoder, "deep.npz", r"set --window \[LOW,HIGH\], the range .*--window full .*--window per_image$"),
        (run, "empty", "is a run's folder: export its encoder first"),
    ):
        with pytest.raises(UserError, match=says):
            embed_images(folder, tmp_path / images, tmp_path / "out.npz")
