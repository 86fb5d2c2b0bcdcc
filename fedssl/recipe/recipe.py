"""Recipes: a few lines of YAML that name a method's parts, checked before anything is loaded."""

import math
from typing import Annotated, Literal

import yaml
from pydantic import Field, InstanceOf, SerializeAsAny

from ..aggregators.base import Aggregator
from ..augmentations.base import Augmentation
from ..data.options import DataOptions
from ..data.partitions import PartitionOptions
from ..evaluation.evaluate import EvaluationOptions
from ..guard import GuardOptions
from ..local_updates.base import LocalUpdate
from ..messages import Transport
from ..models.weights import ModelOptions
from ..objectives.base import Objective
from ..options import Options
from ..regularizers.base import Regularizer
from ..schedules.base import Schedule
from ..training import TrainingOptions
from ..untrusted import NAME_PATTERN, TEXT_PATTERN


class LocalDP(Options):
    """Each client clips its update and adds noise before anything leaves it, by Flower's functions.

    The noise of every entry has the standard deviation 2 * clipping_norm * sqrt(2 ln(1.25 / delta)) / epsilon, the
    Gaussian mechanism of Dwork and Roth (2014, theorem A.1), whose proof is for epsilon below 1. epsilon sets the noise
    of one round; the loss over a client's rounds is counted at the same delta (engines/flower/privacy_accountant.py).
    """

    name: Literal["local_dp"] = Field(..., description="each client adds the noise")
    clipping_norm: float = Field(..., gt=0, description="largest L2 norm of a client's update")
    epsilon: float = Field(..., gt=0, description="sets the noise: privacy loss of one client in one round")
    delta: float = Field(..., gt=0, lt=1, description="probability that the loss is larger than epsilon")

    @property
    def noise_deviation(self) -> float:
        """Return the standard deviation of the noise of every entry, as Flower's LocalDpMod computes it."""
        return 2 * self.clipping_norm * math.sqrt(2 * math.log(1.25 / self.delta)) / self.epsilon


class FixedClipping(Options):
    """Each client clips its update (Flower's fixedclipping_mod), the server adds noise to the mean.

    As in Flower's DifferentialPrivacyClientSideFixedClipping the noise of every entry has the standard deviation
    noise_multiplier * clipping_norm / n (McMahan et al. 2018, Learning differentially private recurrent language
    models); n are the clients in the mean.
    """

    name: Literal["fixed_clipping"] = Field(..., description="the server adds the noise")
    clipping_norm: float = Field(..., gt=0, description="largest L2 norm of a client's update")
    noise_multiplier: float = Field(
        ..., ge=0, description="standard deviation of the noise of the clients' sum, in units of clipping_norm"
    )
    delta: float = Field(
        1e-5,
        gt=0,
        lt=1,
        description="probability that the loss is larger than the epsilon that is counted; far below 1 / clients",
    )


class SecAggPlus(Options):
    """The server learns the clients' sum alone (Flower's SecAgg+; Bell et al. 2020, Secure single-server aggregation
    with (poly)logarithmic overhead).

    A weight is sent as an integer, in steps of at most 4 n clipping_range / 2^32 * max_weight / (the client's images);
    n are the clients of the round.
    """

    name: Literal["secagg_plus"] = Field(..., description="Flower's SecAgg+")
    num_shares: int | None = Field(
        None, ge=3, description="clients that share a client's keys, an odd number; all of the round by default"
    )
    reconstruction_threshold: float = Field(
        2 / 3, gt=0, le=1, description="fraction of the shares that recovers a lost client's key, at least two shares"
    )
    clipping_range: float = Field(64.0, gt=0, description="largest magnitude of a weight; a larger one is refused")
    max_weight: int = Field(1000, ge=1, description="images of the largest client; a client with more is refused")


class FlowerOptions(Options):
    """Flower's waiting times and its privacy methods."""

    round_seconds: float = Field(
        3600, gt=0, description="seconds that a round waits for answers; later ones are ignored"
    )
    grace: float | None = Field(
        None,
        ge=1,
        description="a round no longer waits after so many times the median client's seconds, and a minute at least, "
        "once more than half have answered; null: it waits round_seconds",
    )
    connect_seconds: float = Field(600, gt=0, description="seconds to wait for clients to connect")
    differential_privacy: Annotated[LocalDP | FixedClipping, Field(discriminator="name")] | None = Field(
        None, description="noise that hides each client's weights; null: none (docs/privacy.md)"
    )
    epsilon_budget: float | None = Field(
        None,
        gt=0,
        description="largest privacy loss of a client over all rounds; a round that would pass it is not begun. "
        "null: no limit",
    )
    secure_aggregation: SecAggPlus | None = Field(
        None, description="hides each client's weights from the server; null: off (docs/privacy.md)"
    )


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
    engine: Literal["in-process", "flower-simulation", "flower"] = Field(
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
    checkpoints: int | None = Field(
        None,
        ge=1,
        description="last rounds whose states are kept: fedssl run --resume RUN --from-round N goes back to one; "
        "null: 3, or 1 where a round's states have 100 MB and more",
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
        """Return the architecture of a client, counted from 0; the list `architectures` repeats."""
        return self.architectures[client % len(self.architectures)]

    def to_yaml(self) -> str:
        """Return the recipe as YAML, every option with its value; `load_recipe` reads an equal recipe from it."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
