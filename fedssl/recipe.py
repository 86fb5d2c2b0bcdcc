"""Recipes: a few lines of YAML that name a method's parts, checked before anything is loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, InstanceOf, SerializeAsAny

from .aggregators.base import Aggregator
from .augmentations.base import Augmentation
from .data.options import DataOptions
from .data.partitions import PartitionOptions
from .engine_options import EngineName, FlowerOptions, Place
from .evaluation.options import EvaluationOptions
from .guard import GuardOptions
from .local_updates.base import LocalUpdate
from .messages import Transport
from .models.options import ModelOptions
from .objectives.base import Objective
from .options import Options
from .recipe_text import recipe_yaml
from .regularizers.base import Regularizer
from .schedules.base import Schedule
from .training import TrainingOptions
from .untrusted.printable import NAME_PATTERN, TEXT_PATTERN


class Recipe(Options):
    """A whole run: data, clients, parts, training and evaluation. Every default is filled in."""

    name: str = Field(
        ...,
        pattern=NAME_PATTERN,
        description="what the recipe is called; the default folder of a run is runs/NAME-seedN",
    )
    description: str = Field("", pattern=TEXT_PATTERN, description="what the recipe is; reports show it")
    preset: str = Field(
        "none",
        description="which preset filled in what the recipe leaves open; auto, which a file has without this key, "
        "chooses one for the data, and none takes the defaults",
    )
    seed: int = Field(0, ge=0, description="every random number of the run follows from it")
    rounds: int = Field(..., ge=1, description="rounds of the whole run")
    clients_per_round: int | None = Field(None, ge=1, description="clients sampled in each round; all by default")
    client_dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a sampled client does not answer in a round"
    )
    engine: EngineName = Field(
        "in-process",
        description="what runs the recipe: this process, a simulation by Flower, or Flower across machines",
    )
    flower: FlowerOptions = Field(FlowerOptions(), description="options of both Flower engines")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where networks are trained; auto takes CUDA if there is a device"
    )
    clients_parallel: int = Field(
        1,
        ge=1,
        description="clients that train at a time under the engine in-process, each in a worker process; each has the "
        "threads of this process (OMP_NUM_THREADS) divided by this number, at least one. Results do not depend on this "
        "number, but on the threads of a client and of the server: with OMP_NUM_THREADS=1 they are the same for any",
    )
    client_states: Place = Field(
        "disk", description="where clients' states are kept between rounds; disk holds one client at a time in memory"
    )
    architectures: list[str] = Field(
        ..., min_length=1, description="encoders, fedssl's or any of timm's: client k has the k-th; the list repeats"
    )
    model: ModelOptions = Field(ModelOptions(), description="what the encoders start from")
    data: DataOptions = Field(DataOptions(), description="the images")
    partition: PartitionOptions = Field(PartitionOptions(), description="how the images are divided among the clients")
    augmentation: SerializeAsAny[InstanceOf[Augmentation]] = Field(..., description="the random views of each image")
    objective: SerializeAsAny[InstanceOf[Objective]] = Field(..., description="the loss that every client minimises")
    regularizers: list[SerializeAsAny[InstanceOf[Regularizer]]] = Field(
        default_factory=list, description="terms that are added to the objective"
    )
    schedule: SerializeAsAny[InstanceOf[Schedule]] = Field(
        ..., description="which layers train and travel in each round"
    )
    aggregators: list[SerializeAsAny[InstanceOf[Aggregator]]] = Field(
        default_factory=list, description="what the clients send and how the server joins it; none: nothing travels"
    )
    transport: Transport = Field(
        "float32",
        description="dtype in which float32 tensors travel, both ways; bfloat16 halves the bytes and keeps 8 bits, "
        "int8 quarters those of matrices and larger tensors, each with one scale",
    )
    local_update: SerializeAsAny[InstanceOf[LocalUpdate]] = Field(
        ..., description="what a client does with the weights that it receives"
    )
    training: TrainingOptions = Field(TrainingOptions(), description="a client's training in one round")
    guard: GuardOptions = Field(GuardOptions(), description="when the server refuses a client's answer")
    evaluation: EvaluationOptions = Field(EvaluationOptions(), description="what is measured, and when")

    def architecture_of(self, client: int) -> str:
        """The architecture of a client, from 0; `architectures` repeats."""
        return self.architectures[client % len(self.architectures)]

    def to_yaml(self) -> str:
        """The resolved recipe: every option with its value; `load_recipe` reads it back to an equal recipe."""
        return recipe_yaml(self.model_dump(mode="json"))
