"""Features of images: those that the run's own model gives, in the images' order and under their names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.errors import UserError
from fedssl.export.embed import embed_images, in_channels
from fedssl.export.encoder_folder import export_encoder
from tests.fedssl.export.finished_runs import features_of_run, finished_run


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An exported encoder of grey 8x8 images, its run's folder and federation."""
    folder = tmp_path_factory.mktemp("exported")
    run, federation = finished_run(folder)
    return export_encoder(run, folder / "encoder"), run, federation


def embedded(path):
    with np.load(path) as arrays:
        return torch.from_numpy(arrays["features"]), arrays["files"].tolist()


def test_a_nested_folder_gives_the_runs_features_by_file(exported, tmp_path):
    encoder, run, federation = exported
    pixels = federation.dataset.test_images[:5]
    names = ["a/2.png", "a/10.png", "b/c/1.png", "0.png", "z.PNG"]
    for name, image in zip(names, pixels, strict=True):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    expected = features_of_run(run, federation, pixels)
    for size in (2, 256):
        assert embed_images(encoder, tmp_path / "images", tmp_path / "out.npz", batch_size=size) == ""
        features, files = embedded(tmp_path / "out.npz")
        assert files == sorted(names)
        order = [names.index(name) for name in files]
        torch.testing.assert_close(features, expected[order], rtol=0, atol=1e-5)


def test_every_array_of_an_npz_file_is_embedded(exported, tmp_path):
    encoder, run, federation = exported
    dataset = federation.dataset
    path = tmp_path / "images.npz"
    np.savez(
        path, x_test=dataset.test_images[:, 0].numpy(), x_train=dataset.train_images[:3, 0].numpy(), y_train=[0] * 3
    )
    embed_images(encoder, path, tmp_path / "out.npz")
    features, files = embedded(tmp_path / "out.npz")
    assert files[:4] == ["x_train/0", "x_train/1", "x_train/2", "x_test/0"]
    images = torch.cat([dataset.train_images[:3], dataset.test_images])
    torch.testing.assert_close(features, features_of_run(run, federation, images), rtol=0, atol=1e-5)


def test_colour_and_other_sizes_are_brought_to_the_encoders_form(exported, tmp_path):
    encoder, run, federation = exported
    grey = federation.dataset.test_images[:1]
    large = grey[0].repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)
    (tmp_path / "images").mkdir()
    Image.fromarray(large[0].numpy()).resize((32, 64)).save(tmp_path / "images" / "tall.png")
    Image.fromarray(large.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()).save(
        tmp_path / "images" / "colour.png"
    )
    embed_images(encoder, tmp_path / "images", tmp_path / "out.npz")
    features, files = embedded(tmp_path / "out.npz")
    assert files == ["colour.png", "tall.png"]
    expected = features_of_run(run, federation, grey)
    assert torch.cosine_similarity(features[:1], expected) > 0.9


def test_grey_is_repeated_and_colour_becomes_its_luma():
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [9, 9, 9]], dtype=torch.uint8)[:, :, None, None]
    assert in_channels(colours, 1).flatten().tolist() == pytest.approx([76, 150, 9], abs=1)
    assert torch.equal(in_channels(colours[:, :1], 3), colours[:, :1].expand(-1, 3, -1, -1))
    assert in_channels(colours, 3) is colours


def test_broken_files_are_all_named_and_refused_or_left_out(exported, tmp_path):
    encoder, *_ = exported
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("1.png", "2.png", "3.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / name)
    (folder / "2.png").write_bytes(b"not an image")
    (folder / "empty.jpg").write_bytes(b"")
    output = tmp_path / "out.npz"
    with pytest.raises(
        UserError, match=r"2 of 4 files cannot be read: \S*2\.png \(.*\), \S*empty\.jpg \(.*--skip-broken"
    ):
        embed_images(encoder, folder, output, batch_size=1)
    assert not output.exists()
    left_out = embed_images(encoder, folder, output, batch_size=2, skip_broken=True)
    assert "2.png" in left_out
    assert "empty.jpg" in left_out
    features, files = embedded(output)
    assert files == ["1.png", "3.png"]
    assert len(features) == 2
    for name in ("1.png", "3.png"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="none of the 2 files"):
        embed_images(encoder, folder, output, skip_broken=True)


def test_what_is_not_there_is_said(exported, tmp_path):
    encoder, run, _ = exported
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no image"):
        embed_images(encoder, tmp_path / "empty", tmp_path / "out.npz")
    with pytest.raises(UserError, match="there is no folder or file"):
        embed_images(encoder, tmp_path / "nothing", tmp_path / "out.npz")
    with pytest.raises(UserError, match="is a run's folder: export its encoder first"):
        embed_images(run, tmp_path, tmp_path / "out.npz")
    with pytest.raises(UserError, match="is not an exported encoder"):
        embed_images(tmp_path, tmp_path, tmp_path / "out.npz")


def test_deep_pixels_of_an_array_are_refused_with_an_advice_that_embed_takes(exported, tmp_path):
    np.savez(tmp_path / "deep.npz", x=np.full((2, 8, 8), 4095, np.uint16))
    with pytest.raises(UserError, match=r"set --window \[4095,4095\] or .*--window full .*--window per_image"):
        embed_images(exported[0], tmp_path / "deep.npz", tmp_path / "features.npz")
