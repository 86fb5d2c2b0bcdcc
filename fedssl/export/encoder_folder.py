"""An exported encoder: a folder that another program can load.

    model.safetensors   the weights
    config.json         the network and its input, in the format of timm's models on the Hugging Face hub
    load.py             builds the network and loads the weights, with torch and timm alone
    README.md           a model card
    encoder.onnx        on request, the encoder as one file, which needs neither fedssl nor timm: from pixels between 0
                        and 1, float32 [n, C, H, W], for any n, to float32 [n, d]

The folder holds no images, no paths of the run's data and no class names.
"""

import io
import json
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from fedkernels import __version__

from ..augmentations.random_views import RandomViews
from ..data.options import DataOptions
from ..data.pixels import is_by_channel
from ..errors import UserError, explained, install_command
from ..evaluation.evaluate import EvaluationOptions
from ..evaluation.metrics import METRICS, is_measure
from ..evaluation.verdict import verdict
from ..models.encoders import STEMS, SmallConvNet, build_encoder, has_small_image_stem, stored_stem, timm_arguments
from ..options import validated
from ..run_folder.record import read_run
from ..run_folder.storage import make_folder, require_new_folder, safetensors_of, sync_path, write_atomically, writing
from ..templates import fill_template
from ..untrusted import MOST_BYTES, printable, read_regular_file
from .trained_encoder import GLOBAL, EncoderOfRun, TrainedEncoder, checked_image_shape, encoder_of_run

WEIGHTS, CONFIG, ONNX = "model.safetensors", "config.json", "encoder.onnx"
#: of pixels between 0 and 1, in every channel; the same as `data.pixels.normalize` on uint8
MEAN, STD = 0.5, 0.25
#: the largest difference from the encoder that encoder.onnx may have, relative to the largest feature
ONNX_TOLERANCE = 1e-4
#: of a recipe's evaluation, what an exported encoder is measured with too: no paths, and nothing that takes long
_MEASURING = {"neighbors", "temperature", "linear", "semi_supervised_protocol"}
_VIEWS = set(RandomViews.model_fields) - {"name"}


def export_encoder(
    run: Path,
    output: Path,
    client: int | None = None,
    onnx: bool = False,
    trust: bool = False,
    best: bool = False,
) -> Path:
    """Write a finished run's encoder into a new folder, which gets its name only when it is complete, and return it.

    `client`, `trust` and `best` are those of `encoder_of_run`; with `onnx` encoder.onnx is written as well.

    Raises:
        UserError: see `encoder_of_run`; `output` is not empty or cannot be written; ONNX needs a missing package.
    """
    require_new_folder(output)
    chosen = encoder_of_run(run, client, trust, best)
    network: Any = chosen.encoder.network
    config = encoder_config(chosen, printable(run.resolve().name))
    stem_width = int(network.conv1.out_channels) if has_small_image_stem(network) else None
    script = fill_template("fedssl.export", "load.py.jinja", config=config, stem_width=stem_width)
    parent = output.absolute().parent
    make_folder(parent)
    preparing = parent / f".{output.name}.{secrets.token_hex(8)}"
    with writing(output), ExitStack() as stack:
        stack.callback(shutil.rmtree, preparing, ignore_errors=True)
        preparing.mkdir()
        weights = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
        write_atomically(preparing / WEIGHTS, save_tensors(weights, metadata={"format": "pt"}))
        write_atomically(preparing / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        write_atomically(preparing / "load.py", script.encode())
        write_atomically(preparing / "README.md", model_card(chosen, config, run, onnx).encode())
        if onnx:
            write_onnx(chosen.encoder, preparing)
        os.rename(preparing, output)
        sync_path(parent)
    return output


def encoder_config(chosen: EncoderOfRun, run_name: str) -> dict[str, Any]:
    """Return the content of config.json. What timm does not know is under `fedssl`."""
    encoder, recipe = chosen.encoder, chosen.recipe
    channels, height, width = encoder.image_shape
    statistics = {"mean": [MEAN] * channels, "std": [STD] * channels}
    # a part of one's own cannot be read without its file
    views = recipe.augmentation if isinstance(recipe.augmentation, RandomViews) else RandomViews()
    ours: dict[str, Any] = {
        "version": __version__,
        "architecture": encoder.architecture,
        "image_shape": [channels, height, width],
        **statistics,
        "window": recipe.data.window,
        "channels": recipe.data.channels,
        "stem": STEMS["small" if has_small_image_stem(encoder.network) else "large"],
        "method": recipe.name,
        "objective": recipe.objective.name,
        "run": run_name,
        "seed": recipe.seed,
        "evaluation": recipe.evaluation.model_dump(include=_MEASURING, exclude_defaults=True),
        "augmentation": views.model_dump(mode="json", include=_VIEWS),
        "rounds": recipe.rounds,
        "model": chosen.owner,
        "round": chosen.round,
    }
    if isinstance(encoder.network, SmallConvNet):
        convolutions: Any = encoder.network.blocks[::3]
        ours["strides"] = [convolution.stride[0] for convolution in convolutions]
        ours["widths"] = [convolution.out_channels for convolution in convolutions]
        return {"architecture": encoder.architecture, "num_features": encoder.num_features, "fedssl": ours}
    name, arguments = timm_arguments(encoder.architecture, channels, width)
    return {
        "architecture": name.split(".")[0],
        "num_classes": 0,
        "num_features": encoder.num_features,
        "model_args": arguments,
        "pretrained_cfg": _pretrained_cfg(name.split(".")[0]) | {"input_size": list(encoder.image_shape), **statistics},
        "fedssl": ours,
    }


def model_card(chosen: EncoderOfRun, config: dict[str, Any], path: Path, onnx: bool) -> str:
    """Return the text of README.md, given config.json, the run's folder, and whether encoder.onnx is there."""
    run, end = read_run(path), chosen.measured
    who = chosen.owner if (end, chosen.owner, "effective_rank") in run.values else "mean"
    window = chosen.encoder.window
    if isinstance(window, tuple):
        pairs = window if is_by_channel(window) else (window,)
        limits = [f"from {low:g} (0) to {high:g} (255)" for low, high in pairs]
        window_text = limits[0] if len(limits) == 1 else f"by channel {'; '.join(limits)}"
    else:
        window_text = f"`{window}`" if window else ""
    figures = []  # measures of the model before and after training, if there are any
    for name in dict.fromkeys(name for number, w, name in run.values if number == end and w == who):
        if is_measure(name):
            decimals = METRICS[name].decimals if name in METRICS else 1
            before, after = run.values.get((0, who, name)), run.values[end, who, name]
            figures.append((name, "" if before is None else f"{before:.{decimals}f}", f"{after:.{decimals}f}"))
    return fill_template(
        "fedssl.export",
        "model_card.md.jinja",
        config=config,
        sentence=" ".join(chosen.recipe.description.split()),
        parameters=sum(parameter.numel() for parameter in chosen.encoder.network.parameters()),
        clients=chosen.recipe.partition.clients,
        own_images=0 if chosen.owner == GLOBAL or not run.class_counts else sum(run.class_counts[int(chosen.owner)]),
        images=sum(map(sum, run.class_counts)),
        verdict=" ".join(verdict(run)) if end == run.rounds else "",
        figures=figures,
        means=who == "mean",
        labelled=(end, who, "knn") in run.values,
        window=window_text,
        onnx=onnx,
    )


def _pretrained_cfg(name: str) -> dict[str, Any]:
    """Return timm's entries for an architecture that depend on neither its weights nor its images."""
    from timm.models import PretrainedCfg, get_pretrained_cfg

    known = get_pretrained_cfg(name) or PretrainedCfg()
    # whole images, resized as data.image_size does; the size of the last feature map depends on the image
    transform = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "center"}
    kept = {"first_conv": known.first_conv, "classifier": known.classifier, "pool_size": None}
    return kept | {"fixed_input_size": known.fixed_input_size, "num_classes": 0, **transform}


def read_encoder(folder: Path) -> TrainedEncoder:
    """Return the encoder in an exported folder, on the CPU; raise UserError if the folder holds none or is damaged."""
    if not is_encoder_folder(folder):
        raise UserError(f"{folder} is not an exported encoder: expected a folder with {WEIGHTS} and {CONFIG}")
    unread = f"{folder / CONFIG} cannot be read as an exported encoder's"
    with explained(unread):
        config = json.loads(read_regular_file(folder / CONFIG, MOST_BYTES))
    if not isinstance(config, dict) or not isinstance(config.get("fedssl"), dict):
        raise UserError(f"{folder / CONFIG} was not written by fedssl export: it has no mapping `fedssl`")
    ours = config["fedssl"]
    with explained(unread):
        architecture = str(ours["architecture"])
        channels, _, width = shape = checked_image_shape(ours["image_shape"])
        seed = int(ours.get("seed", 0))
    evaluation = validated(EvaluationOptions, ours.get("evaluation", {}), unread)
    stored = {"name": "images", "path": folder, "window": ours.get("window"), "channels": ours.get("channels")}
    data = validated(DataOptions, stored, unread)
    views = validated(RandomViews, ours.get("augmentation", {}), unread)
    if ours.get("mean") != [MEAN] * channels or ours.get("std") != [STD] * channels:
        raise UserError(
            f"{folder / CONFIG} has mean {ours.get('mean')} and std {ours.get('std')}: expected {MEAN} and {STD}, with "
            "which every encoder of fedssl is trained"
        )
    network = build_encoder(architecture, channels, width, stem=stored_stem(ours)).requires_grad_(False).eval()
    path = folder / WEIGHTS
    with explained(f"{path} cannot be loaded as {architecture}"):
        network.load_state_dict(safetensors_of(read_regular_file(path)))
    return TrainedEncoder(network, architecture, shape, data.window, data.channels, evaluation, seed, views)


def is_encoder_folder(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


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
    with explained(f"{encoder.architecture} cannot be written as {ONNX}"), torch.no_grad(), _quiet():
        program: Any = torch.onnx.export(network, (pixels,), **names, dynamic_shapes=shapes, dynamo=True, verbose=False)
        program.save(file)
        write_atomically(folder / ONNX, file.getvalue())
        try:
            from onnxruntime import InferenceSession
        except ImportError:
            return
        session = InferenceSession(str(folder / ONNX), providers=["CPUExecutionProvider"])
        outputs = torch.from_numpy(session.run(["features"], {"pixels": pixels.numpy()})[0])
        expected = network(pixels)
    difference = float((outputs - expected).abs().max())
    if not difference <= ONNX_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise UserError(
            f"{ONNX} gives other features than the encoder: they differ by up to {difference:.2g}; use "
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
