"""Recipes: a few lines of YAML that name a method's parts, checked before anything is loaded."""

from __future__ import annotations

from typing import Literal

import yaml
from pydantic import Field, InstanceOf, SerializeAsAny

from .aggregators.base import Aggregator
from .data.augmentation import AugmentationOptions
from .data.datasets import DataOptions
from .data.partitions import PartitionOptions
from .engine_options import EngineName, FlowerOptions, Place
from .evaluation.options import EvaluationOptions
from .guard import GuardOptions
from .local_updates.base import LocalUpdate
from .objectives.base import Objective
from .options import Options
from .regularizers.base import Regularizer
from .schedules.base import Schedule
from .training import TrainingOptions

#: recipe keys that hold parts: the folder in which each is looked up, and whether the key holds a list of parts
PART_KEYS: dict[str, tuple[str, bool]] = {
    "objective": ("objectives", False),
    "regularizers": ("regularizers", True),
    "schedule": ("schedules", False),
    "aggregators": ("aggregators", True),
    "local_update": ("local_updates", False),
}


class Recipe(Options):
    """A whole run: data, clients, parts, training and evaluation. `resolved` fills every default."""

    name: str
    description: str = ""
    seed: int = Field(0, ge=0)
    rounds: int = Field(..., ge=1)
    clients_per_round: int | None = Field(None, ge=1, description="sampled each round; all where not given")
    client_dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a sampled client does not answer, for each client and round"
    )
    engine: EngineName = Field(
        "in-process", description="flower-simulation: on Ray, on this machine; flower: across machines, docs/deploy.md"
    )
    flower: FlowerOptions = FlowerOptions()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    client_states: Place = Field(
        "disk", description="where clients' states live between rounds; memory is flat in the clients with disk"
    )
    architectures: list[str] = Field(
        ..., min_length=1, description="client k has architecture k, cyclically: ours or any of timm's"
    )
    data: DataOptions = DataOptions()
    partition: PartitionOptions = PartitionOptions()
    augmentation: AugmentationOptions = AugmentationOptions()
    objective: SerializeAsAny[InstanceOf[Objective]]
    regularizers: list[SerializeAsAny[InstanceOf[Regularizer]]] = Field(default_factory=list)
    schedule: SerializeAsAny[InstanceOf[Schedule]]
    aggregators: list[SerializeAsAny[InstanceOf[Aggregator]]] = Field(default_factory=list)
    local_update: SerializeAsAny[InstanceOf[LocalUpdate]]
    training: TrainingOptions = TrainingOptions()
    guard: GuardOptions = GuardOptions()
    evaluation: EvaluationOptions = EvaluationOptions()

    def architecture_of(self, client: int) -> str:
        """The architecture of a client, from 0; `architectures` repeats."""
        return self.architectures[client % len(self.architectures)]

    def to_yaml(self) -> str:
        """The resolved recipe: every option with its value; `load_recipe` reads it back to an equal recipe."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
