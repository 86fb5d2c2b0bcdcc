"""Exports give the run's features without fedssl, and as ONNX."""

import json
import runpy
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from fedssl.data.pixels import normalize
from fedssl.errors import UserError
from fedssl.evaluation.features import extract_features
from fedssl.export import encoder_folder
from fedssl.export.encoder_folder import export_encoder, read_encoder
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import LW_FEDSSL
from tests.fedssl.export.finished_runs import features_of_run, finished_run


@pytest.fixture
def features_of_a_stranger(monkeypatch):
    """Gives by load.py the features, and what they are pooled from, where neither of our packages can be imported."""

    def features(folder, pixels):
        with monkeypatch.context() as patch, torch.no_grad():
            for name in [name for name in sys.modules if name.partition(".")[0] in ("fedssl", "fedkernels")]:
                patch.setitem(sys.modules, name, None)
            load = runpy.run_path(str(folder / "load.py"))
            encoder, images = load["load_encoder"](), load["normalize"](pixels)
            return encoder(images), encoder.forward_features(images)

    return features


def loaded_by_timm(folder):
    """The network as timm loads it: from the folder, and from the file of weights."""
    yield timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = json.loads((folder / "config.json").read_text())
    arguments = config["model_args"] | {"pretrained_cfg_overlay": {"file": str(folder / "model.safetensors")}}
    yield timm.create_model(config["architecture"], pretrained=True, num_classes=0, **arguments).eval()


@pytest.mark.parametrize(
    ("architecture", "channels", "side", "by_timm"),
    [
        ("small_convnet", 1, 8, False),
        ("small_vit", 1, 8, True),
        ("test_resnet", 3, 16, False),
        ("test_resnet", 3, 72, True),
        ("mobilenetv3_small_050", 1, 32, True),
        pytest.param("vit_tiny_patch16_224", 3, 32, True, marks=pytest.mark.nightly),
    ],
)
def test_a_stranger_gets_the_runs_features(features_of_a_stranger, tmp_path, architecture, channels, side, by_timm):
    run, federation = finished_run(tmp_path, channels, side, architectures=[architecture])
    folder = export_encoder(run, tmp_path / "encoder")
    pixels = federation.dataset.test_images[:5]
    expected = features_of_run(run, federation, pixels)
    features, last = features_of_a_stranger(folder, pixels)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-5)
    for network in loaded_by_timm(folder) if by_timm else ():
        torch.testing.assert_close(extract_features(network, pixels), expected, rtol=0, atol=1e-5)
    encoder = read_encoder(folder)
    assert torch.equal(extract_features(encoder.network, pixels), expected)
    torch.testing.assert_close(last, encoder.network.forward_features(normalize(pixels)), rtol=0, atol=1e-5)
    assert encoder.image_shape == (channels, side, side)
    assert encoder.num_features == expected.shape[1]


@pytest.mark.parametrize("architecture", ["small_convnet", "small_resnet10"])
def test_a_staged_encoder_is_exported_as_the_plain_network(features_of_a_stranger, tmp_path, architecture):
    run, federation = finished_run(tmp_path, **LW_FEDSSL | {"architectures": [architecture]})
    folder = export_encoder(run, tmp_path / "encoder")
    assert not any("module" in name or "reshape" in name for name in load_file(folder / "model.safetensors"))
    pixels = federation.dataset.test_images[:5]
    expected = features_of_run(run, federation, pixels)
    torch.testing.assert_close(features_of_a_stranger(folder, pixels)[0], expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, to be read only."""
    return finished_run(tmp_path_factory.mktemp("run"))[0]


def test_a_clients_own_model(tmp_path):
    run, federation = finished_run(tmp_path, local_update="keep_own", aggregators=[])
    pixels = federation.dataset.test_images[:5]
    folder = export_encoder(run, tmp_path / "encoder", client=1)
    expected = features_of_run(run, federation, pixels, client=1)
    assert torch.equal(extract_features(read_encoder(folder).network, pixels), expected)
    assert not torch.allclose(expected, features_of_run(run, federation, pixels, client=0))
    for client, says in ((None, r"no global model.*--client NUMBER \(0 to 1\)"), (2, "expected 0 to 1, got 2")):
        with pytest.raises(UserError, match=says):
            export_encoder(run, tmp_path / "other", client=client)
    assert not (tmp_path / "other").exists()


def test_a_client_that_stopped_before_the_last_stage_is_refused(tmp_path):
    run, _ = finished_run(tmp_path, **LW_FEDSSL)
    directory = RunDirectory.open(run)
    state = directory.client_state(1)
    directory.write_client(1, 1, state)
    directory.commit(2, directory.server_state(), finished=True)
    with pytest.raises(UserError, match="took part last in round 1, when the encoder had 2 of its 4 layers"):
        export_encoder(run, tmp_path / "encoder", client=1)
    assert export_encoder(run, tmp_path / "encoder", client=0).is_dir()


def test_nothing_is_written_over_and_nothing_is_left_half_written(run, tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="taken exists and is not empty"):
        export_encoder(run, taken)
    assert [path.name for path in taken.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert (export_encoder(run, tmp_path / "empty") / "load.py").is_file()

    def full(*_):
        raise OSError(28, "No space left on device")

    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr("fedssl.export.encoder_folder.model_card", full)
    with pytest.raises(UserError, match="no space left"):
        export_encoder(run, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_export_needs_a_finished_run_but_no_data_and_tells_how_but_not_where_they_lie(tmp_path):
    run, _ = finished_run(tmp_path / "secret_place")
    (tmp_path / "secret_place" / "images.npz").unlink()
    folder = export_encoder(run, tmp_path / "encoder")
    for file in folder.iterdir():
        assert b"secret_place" not in file.read_bytes(), file
        assert b"images.npz" not in file.read_bytes(), file
    assert "data.window" not in (folder / "README.md").read_text()
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("window: null", "window: [-100, 400]"))
    card = (export_encoder(run, tmp_path / "of_deep_pixels") / "README.md").read_text()
    assert "`data.window`: from -100 (0) to 400 (255)." in card
    directory = RunDirectory.open(run)
    directory.commit(1, directory.server_state(), finished=False)
    with pytest.raises(UserError, match=r"is not finished \(1 rounds are done\): continue it with fedssl run --resume"):
        export_encoder(run, tmp_path / "unfinished")
    assert not (tmp_path / "unfinished").exists()


def test_an_export_is_read_and_a_damaged_one_refused(tmp_path):
    run, _ = finished_run(tmp_path, channels=3, side=10)
    folder = export_encoder(run, tmp_path / "encoder")
    assert read_encoder(folder).image_shape == (3, 10, 10)
    config = json.loads((folder / "config.json").read_text())
    faults = {
        "image_shape": [[1, 8], "8x8", [2, 8, 8], [1, 8, 10**9], [1, 8.5, 8], None],
        "architecture": ["hf-hub:somebody/model", "resnet1000", 7],
        "mean": [[0.485], None],
    }
    for key, values in faults.items():
        for value in values:
            (folder / "config.json").write_text(json.dumps(config | {"fedssl": config["fedssl"] | {key: value}}))
            with pytest.raises(UserError):
                read_encoder(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    del weights["blocks.0.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"cannot be loaded as small_convnet.*blocks\.0\.weight"):
        read_encoder(folder)
    for text, says in (("[" * 100_000, "cannot be read"), ("{}", "was not written by fedssl export")):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match=says):
            read_encoder(folder)


# ONNX: it takes pixels between 0 and 1


@pytest.mark.parametrize("architecture", ["small_convnet", pytest.param("small_vit", marks=pytest.mark.nightly)])
def test_onnx_gives_the_features_or_is_left_out_where_they_differ(architecture, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    made, real = [], torch.onnx.export

    def once(*given, **options):  # as it takes seconds
        made.extend([] if made else [real(*given, **options)])
        return made[0]

    monkeypatch.setattr(torch.onnx, "export", once)
    run, federation = finished_run(tmp_path, architectures=[architecture])
    folder = export_encoder(run, tmp_path / "encoder", onnx=True)
    session = pytest.importorskip("onnxruntime").InferenceSession(str(folder / "encoder.onnx"))
    for count in (1, 7):
        images = federation.dataset.test_images[:count]
        features = torch.from_numpy(session.run(None, {"pixels": (images.float() / 255).numpy()})[0])
        torch.testing.assert_close(features, features_of_run(run, federation, images), rtol=0, atol=1e-4)
    monkeypatch.setattr(encoder_folder, "ONNX_TOLERANCE", -1.0)  # no difference is small enough
    with pytest.raises(UserError, match=r"encoder\.onnx gives other features than the encoder"):
        export_encoder(run, tmp_path / "other", onnx=True)
    assert [file.name for file in tmp_path.glob("*other*")] == []


def test_a_missing_package_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"--onnx needs the packages onnx and onnxscript.*fedssl\[export\]"):
        export_encoder(run, tmp_path / "encoder", onnx=True)
    assert [file.name for file in tmp_path.glob("*encoder*")] == []
