"""Weights that encoders start from: exported encoders, files of weights, and timm's pretrained models."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..errors import UserError, explained
from ..options import TRAINED_PATTERN, Options
from ..randomness import generators_set_to
from ..untrusted import MOST_BYTES, listed, quoted, read_regular_file
from .encoders import STEMS, Encoder, Stem, build_encoder, has_small_image_stem, stored_stem


class ModelOptions(Options):
    """The encoders' stem, and weights that they start from. Projectors and predictors are always drawn at random."""

    stem: Stem = Field(
        "auto",
        description="first layers of timm's ResNets: small (one 3x3 convolution, which keeps small details and takes "
        "7 to 13 times as long), large (the architecture's own, of 7x7 with max-pool), or auto: small for images of "
        "at most 64 pixels a side",
    )
    batch_statistics: Literal["trained", "kept"] = Field(
        "trained",
        description="what BatchNorm in the encoders normalises by in training: trained takes each batch's mean and "
        "variance, and keeps a moving mean of them; kept takes those that model.weights brought, which never change: "
        "with few or small images new ones can make good weights worse",
    )
    train: str = Field(
        "all",
        pattern=TRAINED_PATTERN,
        description="what of the encoders trains and travels: all; last:N, the last N layers (a ResNet's stages, a "
        "transformer's blocks); or lora:R, low-rank adapters of rank R on a transformer's attention (needs peft). The "
        "rest stays as model.weights brought it, which every site then reads itself",
    )
    weights: str | dict[str, str] | None = Field(
        None,
        description="weights to start the encoders from: a folder of fedssl export, a safetensors or .pt file "
        "(FILE:NAME where it holds several networks), or timm:NAME; for several architectures a mapping from "
        "architecture to one of these (default: drawn at random). Where a ResNet has a 3x3 stem, a 7x7 stem's weights "
        "are left out",
    )
    digests: dict[str, str] | None = Field(
        None,
        description="SHA-256 of the weights by architecture; a run records them, and is not continued with others",
    )

    def source_of(self, architecture: str) -> str | None:
        """Return the source of an architecture's weights, or None if it starts at random."""
        return self.weights.get(architecture) if isinstance(self.weights, dict) else self.weights

    def without_weights(self) -> ModelOptions:
        """Return the options for encoders whose weights come from elsewhere: the server, or a run's states."""
        return self.model_copy(update={"weights": None, "digests": None})

    def keeps_statistics(self, architecture: str) -> bool:
        """Return whether an architecture's BatchNorm layers keep the statistics that came with its weights."""
        starts_from_some = self.weights is None or self.source_of(architecture) is not None
        return self.batch_statistics == "kept" and starts_from_some

    @model_validator(mode="after")
    def _keeps_something(self) -> ModelOptions:
        if self.batch_statistics == "kept" and self.weights is None:
            raise ValueError(
                "batch_statistics=kept keeps those of weights to start from: give model.weights, or leave it out"
            )
        return self


Weights = dict[str, Tensor]
_TIMM = "timm:"
_MOST_NAMED = 5
_SMALLEST_LIMIT = 2**20  # bytes of a file of weights, below which its size is no limit
_COUNTER = "num_batches_tracked"  # of BatchNorm, which torch's own load_state_dict does without too
_TIMES_STORED = 4  # how often tensors may share what a file stores, as tied weights do


def read_all_weights(options: ModelOptions, architectures: Sequence[str]) -> dict[str, Weights]:
    """Read the weights of each architecture that starts from some, by state-dict names.

    Raises:
        UserError: weights cannot be read, are of another architecture or have another digest than recorded; there is
            one file for several architectures; or a mapping names an architecture that the recipe lacks.
    """
    if options.weights is None:
        return {}
    wanted = list(dict.fromkeys(architectures))
    if isinstance(options.weights, str):
        if len(wanted) > 1:
            example = f"{{{described(options.weights).get('architecture', wanted[0])}: {options.weights}}}"
            raise UserError(
                f"model.weights names one encoder, but architectures has {', '.join(wanted)}: give a mapping such as "
                f"model.weights='{example}'; an architecture that is not in it starts at random"
            )
        sources = {wanted[0]: options.weights}
    else:
        sources = options.weights
        for name in sources:
            if name not in wanted:
                raise UserError(f"model.weights names {name}, but architectures has {', '.join(wanted)}")
    weights = {}
    for architecture, source in sources.items():
        made_for = described(source).get("architecture")
        if made_for not in (None, architecture, architecture.split(".")[0]):
            raise UserError(
                f"model.weights: {source} holds the weights of {made_for}, not of {architecture}: set "
                f"architectures='[{made_for}]', or name other weights"
            )
        weights[architecture] = _read(source)
        recorded = (options.digests or {}).get(architecture)
        if recorded is not None and recorded != digest(weights[architecture]):
            raise UserError(
                f"model.weights: {source} holds other weights than those recorded in model.digests when the run began: "
                "restore the file, or start a new run"
            )
    return weights


def frozen_encoder(source: str, image_shape: Sequence[int], option: str) -> Encoder:
    """Return an encoder with its weights for images [C, H, W], without gradients, in evaluation mode on the CPU.

    Raises:
        UserError: `source` is no folder of `fedssl export` or timm:NAME, or takes no such images. The message begins
            with `option`, which names the source.
    """
    channels, *sides = image_shape
    try:
        if not source.startswith(_TIMM) and not Path(source).exists():
            raise UserError(f"there is no folder {source}: expected a folder of fedssl export, or timm:NAME")
        weights, told = _read(source), described(source)
        if not told:
            raise UserError(f"{source} does not tell its architecture: expected a folder of fedssl export or timm:NAME")
        architecture, trained_on = told["architecture"], told["image_shape"]
        if trained_on and trained_on[1:] != sides:
            raise UserError(
                f"{source} is an encoder of images [channels, height, width] {trained_on}, got {[*image_shape]}: set "
                "data.image_size, or name an encoder of this size"
            )
        with generators_set_to(0):  # a stem for which there are no weights must be the same in every process
            encoder = build_encoder(architecture, channels, sides[1], sides[0], stored_stem(told))
        load_weights(encoder, weights, architecture, source)
    except UserError as error:
        raise UserError(f"{option}: {str(error).removeprefix('model.weights: ')}") from error
    return encoder.requires_grad_(False).eval()


def keep_batch_statistics(network: nn.Module) -> None:
    """Let BatchNorm layers of a network, and of its copies, normalise by their stored statistics in training too."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            keep_in_evaluation_mode(module)


def keep_in_evaluation_mode(module: nn.Module) -> None:
    """Let a module, and its copies, stay in evaluation mode while the network that it is a part of trains."""
    module.eval()
    module.train = _stay_as_it_is  # type: ignore[method-assign, assignment]


def _stay_as_it_is(mode: bool = True) -> None:
    """Stand for a module's own `train`, which its parents call."""


def digest(weights: Weights) -> str:
    """Return the SHA-256 of weights' names, types, shapes and values, not of the file that holds them."""
    return hashlib.sha256(save_tensors({name: weights[name] for name in sorted(weights)})).hexdigest()


def load_weights(encoder: nn.Module, weights: Weights, architecture: str, source: str) -> None:
    """Load weights into an encoder from `build_encoder`; a warning names what is left out or adapted.

    Where all of the encoder's names begin with a prefix, as other programs' checkpoints have it, those are loaded. A
    classifier or another head on top is left out. The stem of a ResNet for small images keeps its random weights where
    the weights have another stem (a 7x7 convolution, or several): the layers above it are loaded. The first convolution
    of an encoder for images of other than three channels gets in each channel the mean over the colours of its weights,
    times 3 / channels. So an encoder for grey images sees them as the weights' network sees three equal channels.
    Nothing is loaded unless all weights fit. Messages call them `source`.

    Raises:
        UserError: a tensor has another shape, is missing, or belongs to nothing; the message names it. Or there are
            several such prefixes.
    """
    own = encoder.state_dict()
    notes = []
    if prefix := _prefix_of(encoder, weights, architecture, source):
        count, weights = len(weights), _below(weights, prefix)
        others = f", and {count - len(weights)} others are left out" if count > len(weights) else ""
        notes.append(f"the encoder's weights are those whose names begin with {prefix}{others}")
    given = {name: tensor for name, tensor in weights.items() if name not in _classifier_names(architecture, own)}
    first = next((name for name, tensor in own.items() if tensor.dim() == 4), None)
    channels = 3 if first is None else own[first].shape[1]
    if first in given and given[first].shape[1:2] == (3,) and channels != 3 and given[first].dim() == 4:
        summed = given[first].sum(dim=1, keepdim=True)
        given[first] = (summed / channels).expand(-1, channels, -1, -1).clone()
        how = "summed over the colours, as the images are grey"
        if channels > 1:
            how = f"averaged over the colours, as the images have {channels} channels"
        notes.append(f"the first convolution's weights are {how}")
    stem, own_stem = ({n: t for n, t in state.items() if n.startswith("conv1.")} for state in (given, own))
    if has_small_image_stem(encoder) and stem and _misfits(own_stem, stem):
        given = {name: tensor for name, tensor in given.items() if name not in stem} | own_stem
        shapes = ", ".join(f"{name} {list(weights[name].shape)}" for name in stem if weights[name].dim() == 4)
        notes.append(f"the 3x3 stem for small images starts at random, as the weights have another stem ({shapes})")
    layers = dict.fromkeys(name.partition(".")[0] for name in own)
    heads = [name for name in given if name.partition(".")[0] not in layers]
    if _misfits(own, fitting := {name: tensor for name, tensor in given.items() if name not in heads}):
        problems = "; ".join(_misfits(own, given))
        if not own.keys() & given.keys() and any(re.match(r"(.*\.)?0\.\w+$", name) for name in given):
            problems += f". Its layers are numbered, as nn.Sequential does: name them {', '.join(layers)} again"
        raise UserError(f"model.weights: {source} does not fit {architecture}: {problems}")
    encoder.load_state_dict(fitting)
    if heads:
        notes.append(f"left out, as the encoder has no such layers: {listed(heads, _MOST_NAMED)}")
    if notes:
        warnings.warn(f"model.weights: {source}: {'; '.join(notes)}", stacklevel=2)


def _prefix_of(encoder: nn.Module, weights: Weights, architecture: str, source: str) -> str:
    """Return what all names of an encoder begin with in a checkpoint: "" where they are names of their own."""
    stem = "conv1." if has_small_image_stem(encoder) else None  # which may be another one
    own = [n for n in encoder.state_dict() if not (stem and n.startswith(stem)) and not n.endswith(_COUNTER)]
    ends = {name.removesuffix(own[0]) for name in weights if name.endswith(own[0])}
    prefixes = sorted(prefix for prefix in ends if all(prefix + name in weights for name in own))
    if len(prefixes) > 1 and "" not in prefixes:
        names = [prefix.removesuffix(".") for prefix in prefixes]
        raise UserError(
            f"model.weights: {source} holds {len(names)} networks that fit {architecture}: {', '.join(names)}; choose "
            f"one, such as model.weights={source}:{names[0]}"
        )
    return "" if "" in prefixes or not prefixes else prefixes[0]


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _misfits(own: Weights, given: Weights) -> list[str]:
    """Return clauses that say what keeps weights from being loaded."""
    misshapen = [name for name in own if name in given and given[name].shape != own[name].shape]
    shapes = [f"{name} has the shape {[*given[name].shape]}, expected {[*own[name].shape]}" for name in misshapen]
    problems = [listed(shapes, _MOST_NAMED)] if shapes else []
    if missing := [name for name in own if name not in given and not name.endswith(_COUNTER)]:
        problems.append(f"missing: {listed(missing, _MOST_NAMED)}")
    if unknown := [name for name in given if name not in own]:
        problems.append(f"in no layer of the encoder: {listed(unknown, _MOST_NAMED)}")
    return problems


def _classifier_names(architecture: str, own: Weights) -> set[str]:
    """Return the names of the classifier's weights in timm's files; the encoder has none."""
    import timm

    known = timm.get_pretrained_cfg(architecture.split(".")[0]) if timm.is_model(architecture.split(".")[0]) else None
    classifier: Any = (known.classifier if known else None) or "fc"
    heads = (classifier,) if isinstance(classifier, str) else classifier
    return {f"{head}.{kind}" for head in heads for kind in ("weight", "bias")} - own.keys()


def described(source: str) -> dict[str, Any]:
    """Return `architecture`, `stem` and `image_shape` of a source of weights; nothing if it does not tell them."""
    if source.startswith(_TIMM):
        return {"architecture": source.removeprefix(_TIMM).split(".")[0], "stem": STEMS["large"], "image_shape": []}
    config = Path(source) / "config.json"
    if not config.is_file():
        return {}
    with explained(f"model.weights: {config} cannot be read as an exported encoder's"):
        values: Any = json.loads(read_regular_file(config, MOST_BYTES))
        values = values.get("fedssl", values)
        stem = values.get("stem", STEMS["large"] if "pretrained_cfg" in values else "")  # the latter is timm's own file
        image_shape = [int(side) for side in values.get("image_shape", ())]
        return {"architecture": str(values["architecture"]), "stem": stem, "image_shape": image_shape}


def _read(source: str) -> Weights:
    if source.startswith(_TIMM):
        return _from_timm(source.removeprefix(_TIMM))
    file, _, network = source.rpartition(":")
    if network and file and not Path(source).exists():
        weights = _read(file)
        if not (chosen := _below(weights, f"{network}.")):
            beginnings = list(dict.fromkeys(name.partition(".")[0] for name in weights))
            raise UserError(
                f"model.weights: {file} holds no tensors whose names begin with {network}.: it has names that begin "
                f"with {listed(beginnings, _MOST_NAMED)}"
            )
        return chosen
    path = Path(source)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if (run / "checkpoints" / "manifest.json").is_file():
        raise UserError(
            f"model.weights: {path} is a run's: export its encoder first, with fedssl export {quoted(run)} FOLDER"
        )
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise UserError(
            f"model.weights: there is no file {path}; expected a folder of fedssl export, a safetensors or .pt file, "
            "or timm:NAME"
        )
    from timm.models import load_state_dict

    most = max(path.stat().st_size, _SMALLEST_LIMIT)  # torch.save compresses nothing
    if is_archive := zipfile.is_zipfile(path):
        damaged = f"model.weights: {path} is a damaged archive"
        with explained(damaged, "; copy or write it again"), zipfile.ZipFile(path) as archive:
            _require_at_most(most, sum(entry.file_size for entry in archive.infolist()), path)
    advice = "; expected tensors by name, written by safetensors or torch.save. Files that hold code are never run"
    with explained(f"model.weights: {path} cannot be read as weights", advice):
        others = get_unsafe_globals_in_checkpoint(str(path)) if is_archive else ["argparse.Namespace"]
        kinds = [_LeftOutTuple if name.startswith(("numpy.", "functools.")) else _LeftOut for name in others]
        with safe_globals([*zip(kinds, others, strict=True)]):
            state = load_state_dict(str(path), weights_only=True)
    tensors = _flat(state) if isinstance(state, dict) else {}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _require_at_most(_TIMES_STORED * most, size, path)  # a tensor may repeat a few stored values without end
    return _tensors_of(tensors, path)


class _LeftOut:
    """Stand for what a file holds beside tensors, such as settings: nothing that the file names is run."""

    def __new__(cls, *arguments: object) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        """Return what torch lets a file fill with anything."""
        return OrderedDict()


class _LeftOutTuple:
    """Stand for what is filled from a tuple: NumPy's numbers and arrays, and functions with arguments."""

    def __init__(self, *arguments: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _flat(state: dict[Any, Any], prefix: str = "") -> Weights:
    """Return the dense tensors of nested mappings by their names, joined by dots; not an optimizer's, with numbers."""
    found: Weights = {}
    for name, value in state.items():
        if isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided:
            found[prefix + name] = value
        elif isinstance(name, str) and isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
    return found


def _require_at_most(most: int, size: int, path: Path) -> None:
    if size > most:
        raise UserError(
            f"model.weights: {path} has {path.stat().st_size:,} bytes, but what it holds would take {size:,}, which no "
            "file does that torch.save or safetensors wrote: get the weights from whoever made them"
        )


def _tensors_of(state: Weights, source: object) -> Weights:
    if not state:
        raise UserError(
            f"model.weights: {source} holds no weights; expected dense tensors by name, as of a state_dict()"
        )
    # Copies in torch's own memory: see storage.read_message.
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _from_timm(name: str) -> Weights:
    import timm
    from timm.models import is_model_pretrained

    if not timm.is_model(name.split(".")[0]):
        raise UserError(f"model.weights: timm has no model {name!r}; timm.list_pretrained() lists those with weights")
    known = timm.get_pretrained_cfg(name) if is_model_pretrained(name) else None
    if known is None or not known.has_weights:
        raise UserError(f"model.weights: timm has no pretrained weights {name!r}; timm.list_pretrained() lists them")
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the hub's client tells of every attempt
    try:
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # the hub's client raises many kinds
        fetch = f"curl -LO {known.url}; copy the file here and set model.weights=FILE"
        if known.hf_hub_id:
            files = "model.safetensors config.json --local-dir FOLDER"
            fetch = f"hf download {known.hf_hub_id} {files}; copy FOLDER here and name it in place of {_TIMM}{name}"
        raise UserError(
            f"model.weights: {_TIMM}{name} cannot be fetched here ({type(error).__name__}); on a machine with access "
            f"run: {fetch}"
        ) from error
    finally:
        logging.disable(disabled)
    return _tensors_of(model.state_dict(), _TIMM + name)
