"""ONNX, TorchScript and torch.export files of an encoder take pixels between 0 and 1 and give its features."""

from __future__ import annotations

import sys

import pytest
import torch

from fedssl.errors import UserError
from fedssl.export import compiled_formats
from fedssl.export.compiled_formats import FILES
from fedssl.export.encoder_folder import export_encoder
from tests.fedssl.export.finished_runs import features_of_run, finished_run


def run_file(path, pixels):
    if path.suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        return torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])
    with torch.no_grad():
        return torch.export.load(str(path)).module()(pixels) if path.suffix == ".pt2" else torch.jit.load(path)(pixels)


@pytest.mark.parametrize(
    ("architecture", "side"),
    [("small_convnet", 8), ("small_vit", 8), pytest.param("small_resnet10", 8, marks=pytest.mark.nightly)],
)
def test_every_format_gives_the_features_for_any_number_of_images(tmp_path, architecture, side):
    pytest.importorskip("onnxscript")
    run, federation = finished_run(tmp_path, side=side, architectures=[architecture])
    folder = export_encoder(run, tmp_path / "encoder", formats=list(FILES))
    for count in (1, 7):
        images = federation.dataset.test_images[:count]
        expected = features_of_run(run, federation, images)
        for file in FILES.values():
            features = run_file(folder / file, images.float() / 255)
            torch.testing.assert_close(features, expected, rtol=0, atol=1e-4)


def test_a_file_with_other_features_and_a_missing_package_leave_nothing(tmp_path, monkeypatch):
    run, _ = finished_run(tmp_path)
    write = compiled_formats._write_torchscript
    monkeypatch.setattr(compiled_formats, "_write_torchscript", lambda *arguments: write(*arguments) + 0.01)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    for name, says in {
        "torchscript": r"encoder.torchscript.pt gives other features than the encoder",
        "onnx": r"--onnx needs the packages onnx and onnxscript.*fedssl\[export\]",
    }.items():
        with pytest.raises(UserError, match=says):
            export_encoder(run, tmp_path / "encoder", formats=[name])
        assert not (tmp_path / "encoder").exists()
        assert not list(tmp_path.glob(".encoder*"))
