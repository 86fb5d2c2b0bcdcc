"""The encoder at the end of a finished run, as a plain network on the CPU."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..augmentations.base import Augmentation
from ..augmentations.random_views import RandomViews
from ..data.options import MOST_CHANNELS
from ..data.pixels import Window
from ..errors import UserError, explained
from ..evaluation.evaluate import EvaluationOptions
from ..federation import MODEL
from ..models.encoders import build_encoder
from ..models.stages import StagedEncoder
from ..models.trained_part import freeze, merged
from ..recipe.reading import load_stored_recipe
from ..recipe.recipe import Recipe
from ..run_folder.directory import IMAGE_SHAPE, RunDirectory
from ..untrusted import MOST_BYTES, read_regular_file

GLOBAL = "global"
_LARGEST_SIDE = 8192
_ENCODER = "online.encoder."


@dataclass(frozen=True, eq=False)
class TrainedEncoder:
    """An encoder: `network` maps normalised float32 [n, C, H, W] to float32 [n, num_features], in evaluation mode."""

    network: nn.Module
    architecture: str  # as in a recipe's `architectures`
    image_shape: tuple[int, int, int]  # channels, height, width
    window: Window | None = None  # how its run brought pixels of more than 8 bits to 8 bits; None if there were none
    channels: int | None = None  # its run's data.channels
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)  # by which its run measured it
    seed: int = 0  # its run's
    views: Augmentation = field(default_factory=RandomViews)  # its run's, by which their retrieval is measured

    @property
    def num_features(self) -> int:
        return int(self.network.num_features)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class EncoderOfRun:
    """A run's encoder, its owner (`global` or a client's number), and the round after which it had these weights.

    `measured` is the round whose evaluation measured it.
    """

    encoder: TrainedEncoder
    recipe: Recipe
    owner: str
    round: int
    measured: int


def encoder_of_run(path: Path, client: int | None = None, trust: bool = False, best: bool = False) -> EncoderOfRun:
    """Return the encoder of a finished run's global model, or of one client's model.

    A staged encoder (layer-wise and progressive schedules) is returned as the plain network that it was cut from.

    Args:
        client: a client's number (default: the global model, or the only client's); its model after its last training.
        trust: see `load_stored_recipe`.
        best: as it was after the best round (`evaluation.keep_best`), also if the run is not finished.

    Raises:
        UserError: no finished run; no such round or model; the model is at a site; or its file cannot be read.
    """
    directory = RunDirectory.open(path)
    if best:
        directory.read_best()
    checkpoint = directory.checkpoint
    if not (checkpoint.finished or best):
        done = f"{checkpoint.round} rounds are done" if checkpoint.round > 0 else "no round is done"
        raise UserError(
            f"{path} is not finished ({done}): continue it with {directory.continued_by}, then export"
            + ", or export its best round with --best" * (checkpoint.best is not None)
        )
    recipe = load_stored_recipe(directory, trust)
    owner = _owner(recipe, path, client)
    if owner == GLOBAL:
        entries: Mapping[str, Tensor] = directory.server_state().tensors
        number, architecture = checkpoint.round, recipe.architecture_of(0)
    else:
        last = directory.client_rounds.get(int(owner))
        if last is None:
            raise UserError(f"client {owner} has not taken part in any round of {path}, so it has no trained model")
        number, architecture = last, recipe.architecture_of(int(owner))
        state = directory.client_state(int(owner)).tensors
        entries = {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}
        if not any(name.startswith(_ENCODER) for name in entries):
            raise UserError(
                f"client {owner} took part last in round {last} of {recipe.rounds}, and only local models of the last "
                "round are kept: export the global model, without --client, or another client's"
            )
    file = path / IMAGE_SHAPE
    with explained(f"{file} cannot be read", "; expected channels, height and width"):
        values = json.loads(read_regular_file(file, MOST_BYTES))
        shape = checked_image_shape([values["channels"], values["height"], values["width"]])
    network: nn.Module = build_encoder(architecture, shape[0], shape[2], stem=recipe.model.stem)
    freeze(network, recipe.model.train, architecture, shape)
    network = recipe.schedule.adapt(network)
    if isinstance(network, StagedEncoder):
        depth = recipe.schedule.plan(network.layers, max(number, 1), recipe.seed).depth
        if depth < network.layers:
            had = f"the encoder had {depth} of its {network.layers} layers: export"
            if owner == GLOBAL:
                raise UserError(f"in round {number}, the best one, {had} the last round's, without --best")
            why = f"client {owner} took part last in round {number}, when {had} the global model, without --client"
            raise UserError(f"{why}, or another client's")
    weights = {name.removeprefix(_ENCODER): t for name, t in entries.items() if name.startswith(_ENCODER)}
    with explained(f"the weights in {path} do not fit {architecture}"):
        network.load_state_dict(weights)
    plain = network.plain_network() if isinstance(network, StagedEncoder) else merged(network)
    plain.requires_grad_(False).eval()
    trained = TrainedEncoder(plain, architecture, shape, recipe.data.window, recipe.data.channels)
    return EncoderOfRun(trained, recipe, owner, number, directory.checkpoint.round)


def _owner(recipe: Recipe, path: Path, client: int | None) -> str:
    clients = recipe.partition.clients
    if client is not None:
        if not 0 <= client < clients:
            raise UserError(f"--client: expected 0 to {clients - 1}, got {client}")
        return str(client)
    if not recipe.local_update.personal:
        return GLOBAL
    if clients > 1:
        raise UserError(
            f"{path} has no global model, as each client keeps its own: choose one with --client NUMBER "
            f"(0 to {clients - 1}); metrics.csv and the report have each client's figures"
        )
    return "0"


def checked_image_shape(sides: Any) -> tuple[int, int, int]:
    """Return channels, height and width from a file of unknown origin; raise ValueError if they are no image's."""
    largest = (MOST_CHANNELS, _LARGEST_SIDE, _LARGEST_SIDE)
    whole = isinstance(sides, list) and len(sides) == 3 and all(type(side) is int for side in sides)
    if not whole or not all(1 <= side <= most for side, most in zip(sides, largest, strict=True)):
        raise ValueError(f"expected whole numbers from 1 to {largest}, got {str(sides)[:100]}")
    channels, height, width = sides
    return channels, height, width
