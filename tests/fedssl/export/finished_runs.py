"""Folders of finished runs, made without training: random weights and random BatchNorm statistics."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedssl.engines.rounds import first_files
from fedssl.evaluation.features import extract_features
from fedssl.federation import Federation, build_federation
from fedssl.recipe.reading import parse_recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.data.data_files import random_pixels, save


def write_images(path: Path, channels: int = 1, side: int = 8) -> Path:
    """An .npz file of noise with two classes."""
    arrays = {}
    for part, size in (("train", 60), ("test", 20)):
        arrays[f"x_{part}"] = random_pixels(size, side, side, channels, seed=size)
        arrays[f"y_{part}"] = np.arange(size) % 2
    return save(path, **arrays)


def finished_run(folder: Path, channels: int = 1, side: int = 8, **changes: Any) -> tuple[Path, Federation]:
    """A run's folder in `folder` as after its last round, and its federation."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"name": "npz", "path": str(write_images(folder / "images.npz", channels, side))}
    partition = {"name": "iid", "clients": 2}
    recipe = parse_recipe(tiny_values(**({"data": data, "partition": partition} | AVERAGED | changes)))
    federation = build_federation(recipe)
    directory = RunDirectory.create(folder / "run", first_files(federation))
    generator = torch.Generator().manual_seed(1)
    for k in range(recipe.partition.clients):
        client = federation.client(k, directory.client_state(k))
        randomise(client.model.state_dict(), generator)
        directory.write_client(k, recipe.rounds, federation.client_state(client, recipe.rounds))
    server = federation.method.initial_state()
    randomise(server.tensors, generator)
    directory.commit(recipe.rounds, server, finished=True)
    return folder / "run", federation


def randomise(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    """Change weights and BatchNorm statistics in place, so that an untouched one is seen."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.add_(0.1 * noise if name.endswith("running_var") else 0.1 * (noise - 0.5))


def features_of_run(run: Path, federation: Federation, images: Tensor, client: int | None = None) -> Tensor:
    """Return the features of uint8 images by the run's own model."""
    directory = RunDirectory.open(run)
    if client is not None:
        return extract_features(federation.client(client, directory.client_state(client)).model.encoder, images)
    model = federation.method.load_global(directory.server_state(), lambda: federation.new_model(None))
    return extract_features(model.encoder, images)
