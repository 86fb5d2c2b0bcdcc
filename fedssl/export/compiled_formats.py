"""An encoder as one file that needs neither fedssl nor timm: ONNX or torch.export.

Both take pixels between 0 and 1, float32 [n, C, H, W], for any n, normalise them, and return float32 [n, d].
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError, explained, install_command
from ..run_folder.storage import write_atomically
from .trained_encoder import TrainedEncoder

FormatName = Literal["onnx", "torch-export"]
FILES: dict[FormatName, str] = {"onnx": "encoder.onnx", "torch-export": "encoder.pt2"}
#: of pixels between 0 and 1, in every channel; the same as `data.pixels.normalize` on uint8
MEAN, STD = 0.5, 0.25
#: the largest difference from the encoder that a written file may have, relative to the largest feature
TOLERANCE = 1e-4


class WithNormalization(nn.Module):
    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: Tensor) -> Tensor:
        return self.encoder((pixels - MEAN) / STD)


def write_format(name: FormatName, encoder: TrainedEncoder, folder: Path) -> None:
    """Write a compiled form, and compare its output with the encoder's on images of noise.

    ONNX is compared only if onnxruntime is installed. UserError is raised if a package is missing, or the network
    cannot be compiled or gives other outputs.
    """
    network = WithNormalization(encoder.network).eval()
    path = folder / FILES[name]
    pixels = torch.rand(3, *encoder.image_shape, generator=torch.Generator().manual_seed(0))
    write = _write_onnx if name == "onnx" else _write_torch_export
    with explained(f"{encoder.architecture} cannot be written as {FILES[name]}"), torch.no_grad(), _quiet():
        outputs = write(network, pixels, path)
        expected = network(pixels)
    if outputs is None:
        return
    difference = float((outputs - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"{FILES[name]} gives other features than the encoder: they differ by up to {difference:.2g}; use "
            "model.safetensors with load.py"
        )


def _write_onnx(network: WithNormalization, pixels: Tensor, path: Path) -> Tensor | None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        message = f"--onnx needs the packages onnx and onnxscript ({error}): {install_command('export')}"
        raise UserError(message) from error
    names: Any = {"input_names": ["pixels"], "output_names": ["features"]}
    shapes = ({0: torch.export.Dim("n")},)
    program: Any = torch.onnx.export(network, (pixels,), **names, dynamic_shapes=shapes, dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    write_atomically(path, file.getvalue())
    try:
        from onnxruntime import InferenceSession
    except ImportError:
        return None
    session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["features"], {"pixels": pixels.numpy()})[0])


def _write_torch_export(network: WithNormalization, pixels: Tensor, path: Path) -> Tensor:
    file = io.BytesIO()
    torch.export.save(torch.export.export(network, (pixels,), dynamic_shapes=({0: torch.export.Dim("n")},)), file)
    write_atomically(path, file.getvalue())
    return torch.export.load(str(path)).module()(pixels)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' progress and their warnings about themselves."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
