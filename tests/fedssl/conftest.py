"""A recipe that runs in a second or two, for tests of everything around the training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from fedssl.recipe import Recipe, parse_recipe

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
    "architectures": ["small_convnet", "small_resnet10"],
    "regularizers": [{"name": "cka_alignment", "weight": 0.5, "batch_size": 16}],
    "aggregators": [{"name": "representation_mean"}],
}
AVERAGED: dict[str, Any] = {"aggregators": ["weighted_mean"], "local_update": "replace"}


def tiny_values(**changes: Any) -> dict[str, Any]:
    """The tiny recipe as a mapping, with top-level keys replaced."""
    return copy.deepcopy(TINY) | copy.deepcopy(changes)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Recipe]:
    """Build the tiny recipe with top-level keys replaced; without changes it is local-only BYOL."""
    return lambda **changes: parse_recipe(tiny_values(**changes))
