"""Options of the engines, as recipes hold them."""

from typing import Annotated, Literal

from pydantic import Field

from .options import Options

#: where the clients' states live between rounds
Place = Literal["disk", "memory"]
EngineName = Literal["in-process", "flower-simulation", "flower"]


class LocalDP(Options):
    """Each client clips its update and adds noise before anything leaves it (Flower's LocalDpMod).

    The noise of every entry has the standard deviation sensitivity * sqrt(2 ln(1.25 / delta)) / epsilon, the Gaussian
    mechanism of Dwork and Roth (2014, theorem A.1), whose proof is for epsilon below 1. (epsilon, delta) is what one
    round spends of one client; rounds add up.
    """

    name: Literal["local_dp"]
    clipping_norm: float = Field(..., gt=0, description="largest L2 norm of a client's update")
    epsilon: float = Field(..., gt=0)
    delta: float = Field(..., gt=0, lt=1)
    sensitivity: float | None = Field(
        None, gt=0, description="2 * clipping_norm where not given: the most by which two clipped updates differ"
    )


class FixedClipping(Options):
    """Each client clips its update (Flower's fixedclipping_mod), the server adds noise to the mean.

    As in Flower's DifferentialPrivacyClientSideFixedClipping the noise of every entry has the standard deviation
    noise_multiplier * clipping_norm / n (McMahan et al. 2018, Learning differentially private recurrent language
    models); n are the clients in the mean.
    """

    name: Literal["fixed_clipping"]
    clipping_norm: float = Field(..., gt=0, description="largest L2 norm of a client's update")
    noise_multiplier: float = Field(..., ge=0)


class SecAggPlus(Options):
    """The server learns the clients' sum alone (Flower's SecAgg+; Bell et al. 2020, Secure single-server aggregation
    with (poly)logarithmic overhead).

    A weight is sent as an integer, in steps of at most 4 n clipping_range / 2^32 * max_weight / (the client's images);
    n are the clients of the round.
    """

    name: Literal["secagg_plus"]
    num_shares: int | None = Field(
        None, ge=3, description="clients among whom a client's keys are shared, odd; all of the round where not given"
    )
    reconstruction_threshold: float = Field(
        2 / 3, gt=0, le=1, description="fraction of the shares that opens a lost client's key; at least two shares"
    )
    clipping_range: float = Field(64.0, gt=0, description="largest magnitude of a weight; more is refused")
    max_weight: int = Field(1000, ge=1, description="images of the largest client; one that has more is refused")


class FlowerOptions(Options):
    """How the Flower engine waits, what of Flower's privacy is on, and what a simulation takes of this machine."""

    round_seconds: float = Field(3600, gt=0, description="how long a round waits for answers; later ones are dropped")
    connect_seconds: float = Field(600, gt=0, description="how long to wait for clients that are not connected")
    differential_privacy: Annotated[LocalDP | FixedClipping, Field(discriminator="name")] | None = Field(
        None, description="local_dp or fixed_clipping, for recipes that exchange weights; docs/deploy.md"
    )
    secure_aggregation: SecAggPlus | None = Field(
        None, description="secagg_plus, for recipes that average weights; docs/deploy.md"
    )
    cpus: int | None = Field(None, ge=1, description="simulation: processor cores; all where not given")
    client_cpus: int = Field(1, ge=1, description="simulation: cores a client; cpus / client_cpus train at a time")
    client_gpus: float = Field(0.0, ge=0, description="simulation: CUDA devices a client; 0.25 lets four share one")
    object_store_megabytes: int | None = Field(None, ge=80, description="simulation: Ray's shared memory")
