"""A recipe that runs in a second or two, for tests of everything around the training."""

import copy
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

import fedssl
from fedssl.cli import main
from fedssl.models.encoders import build_encoder
from fedssl.randomness import seeded
from fedssl.recipe.reading import parse_recipe
from fedssl.recipe.recipe import Recipe

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 0,
    "rounds": 2,
    "device": "cpu",
    "architectures": ["small_convnet"],
    "data": {"name": "digits", "train_limit": 120, "test_limit": 60, "public_holdout": 30},
    "partition": {"name": "disjoint_classes", "clients": 3, "classes_per_client": 4},
    "augmentation": {"flip": 0.0},
    "objective": {"name": "byol", "hidden_features": 32, "output_features": 16},
    "schedule": "end_to_end",
    "local_update": "keep_own",
    "training": {"local_epochs": 1, "batch_size": 8},
    "evaluation": {"neighbors": 5, "linear": {"epochs": 2}},
}
ALIGNED: dict[str, Any] = {
    "architectures": ["small_convnet", "small_convnet_wide"],
    "regularizers": [{"name": "cka_alignment", "weight": 0.5, "batch_size": 16}],
    "aggregators": [{"name": "representation_mean"}],
}
AVERAGED: dict[str, Any] = {"aggregators": ["weighted_mean"], "local_update": "replace"}
FEDU2: dict[str, Any] = {
    "aggregators": ["eua"],
    "regularizers": [{"name": "uniformity", "weight": 0.1, "tau_a": 0.8, "tau_b": 0.8}],
    "local_update": "replace",
}
#: two rounds, each a stage of its own
LW_FEDSSL: dict[str, Any] = AVERAGED | {
    "objective": {"name": "moco_v3", "hidden_features": 16, "output_features": 8},
    "schedule": {"name": "layer_wise", "layers_per_stage": 2, "rounds_per_stage": 1},
    "training": {"local_epochs": 1, "batch_size": 8, "optimizer": "adamw"},
}
#: a file of one's own part
OWN_PART = '''"""A term of one's own."""

from pydantic import Field

from fedssl.regularizers.base import Regularizer


class Own(Regularizer):
    """Adds nothing.

    It is for a test.
    """

    strength: float = Field(0.5, ge=0, description="how much of nothing")

    def start_round(self, local):
        return lambda step: step.loss.new_zeros(())
'''
#: images of the noise
SIZES = {"train": 800, "test": 60}
#: methods that tests of engines run; none needs timm, whose import takes each of an engine's processes seconds, and
#: a run with a ResNet takes three times as long
METHODS: dict[str, dict[str, Any]] = {"hetero_ssfl": ALIGNED, "fedu2": FEDU2, "lw_fedssl": LW_FEDSSL}


def tiny_values(**changes: Any) -> dict[str, Any]:
    """The tiny recipe as a mapping, with top-level keys replaced."""
    return copy.deepcopy(TINY) | copy.deepcopy(changes)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Recipe]:
    """Build the tiny recipe with top-level keys replaced; without changes it is local-only BYOL."""
    return lambda **changes: parse_recipe(tiny_values(**changes))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder of the session that all of its processes share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def noisy(shared_folder) -> Callable[..., Recipe]:
    """Build the tiny recipe on images of noise: the digits would import scikit-learn in each of an engine's processes.

    `public` is the number of public images.
    """
    path = shared_folder / "noise.npz"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            random = np.random.default_rng(0)
            images = {f"x_{part}": random.integers(0, 256, (size, 8, 8), np.uint8) for part, size in SIZES.items()}
            labels = {f"y_{part}": np.arange(size) % 10 for part, size in SIZES.items()}
            np.savez(path, **images, **labels)
    data = {"name": "npz", "path": str(path), "train_limit": 120}
    return lambda public=30, **changes: parse_recipe(
        tiny_values(**({"data": data | {"public_holdout": public}} | changes))
    )


#: options of objective and regularizer `distillation`, once the fixture `teacher` has made the folder
TAUGHT: dict[str, str] = {}


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> Path:
    """The folder of an encoder for grey images of 8x8 pixels, with random weights."""
    folder = tmp_path_factory.mktemp("teacher")
    with seeded(1, "teacher"):
        save_file(build_encoder("small_convnet_wide", 1, 8).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "small_convnet_wide"}')
    TAUGHT["teacher"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def finished(shared_folder) -> Iterator[Callable[[Recipe], Path]]:
    """Return the folder of the recipe's finished run, made once in a session: read it only, or copy it.

    The first process to ask makes it for all. A test that changes a file of it fails the session.
    """
    used: dict[Path, list[tuple[str, int, int]]] = {}

    def folder_of(recipe: Recipe) -> Path:
        digest = hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()[:16]
        path = shared_folder / f"finished-{digest}"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                fedssl.run(recipe, path.with_suffix(".new")).path.rename(path)
        used.setdefault(path, files_of(path))
        return path

    yield folder_of
    for path, files in used.items():
        assert files_of(path) == files, f"a test has changed {path}, which others read: let it copy the folder"


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """The name, size and time of each file."""
    found = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for path, stat in found]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As sites and simulated clients have: a sum over another number of threads rounds differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def few_neighbours(monkeypatch) -> None:
    """A report's sheet of eight rows of images takes seconds to draw."""
    monkeypatch.setattr("fedssl.reports.images._QUERIES", 2)
    monkeypatch.setattr("fedssl.reports.images._NEIGHBOURS", 3)


@pytest.fixture(name="fedssl")
def command_line(monkeypatch, capsys, tmp_path):
    """Call `fedssl` in an empty folder at a width in columns; gives (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, columns: int = 200) -> tuple[int, str, str]:
        for variable in ("COLUMNS", "TERMINAL_WIDTH"):
            monkeypatch.setenv(variable, str(columns))
        monkeypatch.setattr(sys, "argv", ["fedssl", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call
