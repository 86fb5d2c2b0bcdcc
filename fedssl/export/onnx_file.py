"""An encoder as one ONNX file, which needs neither fedssl nor timm.

It takes pixels between 0 and 1, float32 [n, C, H, W], for any n, normalises them, and returns float32 [n, d].
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, explained, install_command
from ..run_folder.storage import write_atomically
from .trained_encoder import TrainedEncoder

FILE = "encoder.onnx"
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


def write_onnx(encoder: TrainedEncoder, folder: Path) -> None:
    """Write encoder.onnx, and where onnxruntime is installed compare its output with the encoder's on images of noise.

    UserError is raised if a package is missing, or the network cannot be compiled or gives other outputs.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        message = f"--onnx needs the packages onnx and onnxscript ({error}): {install_command('export')}"
        raise UserError(message) from error
    network, file = WithNormalization(encoder.network).eval(), io.BytesIO()
    pixels = torch.rand(3, *encoder.image_shape, generator=torch.Generator().manual_seed(0))
    names: Any = {"input_names": ["pixels"], "output_names": ["features"]}
    shapes = ({0: torch.export.Dim("n")},)
    with explained(f"{encoder.architecture} cannot be written as {FILE}"), torch.no_grad(), _quiet():
        program: Any = torch.onnx.export(network, (pixels,), **names, dynamic_shapes=shapes, dynamo=True, verbose=False)
        program.save(file)
        write_atomically(folder / FILE, file.getvalue())
        try:
            from onnxruntime import InferenceSession
        except ImportError:
            return
        session = InferenceSession(str(folder / FILE), providers=["CPUExecutionProvider"])
        outputs = torch.from_numpy(session.run(["features"], {"pixels": pixels.numpy()})[0])
        expected = network(pixels)
    difference = float((outputs - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"{FILE} gives other features than the encoder: they differ by up to {difference:.2g}; use "
            "model.safetensors with load.py"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's progress and its warnings about itself."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
