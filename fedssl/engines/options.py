"""Options of the engines, as recipes hold them."""

from typing import Literal

from pydantic import Field

from ..options import Options

EngineName = Literal["in-process", "flower-simulation", "flower"]


class FlowerOptions(Options):
    """How the Flower engine waits, and what a simulation takes of this machine."""

    round_seconds: float = Field(3600, gt=0, description="how long a round waits for answers; later ones are dropped")
    connect_seconds: float = Field(600, gt=0, description="how long to wait for clients that are not connected")
    cpus: int | None = Field(None, ge=1, description="simulation: processor cores; all where not given")
    client_cpus: int = Field(1, ge=1, description="simulation: cores a client; cpus / client_cpus train at a time")
    client_gpus: float = Field(0.0, ge=0, description="simulation: CUDA devices a client; 0.25 lets four share one")
    object_store_megabytes: int | None = Field(None, ge=80, description="simulation: Ray's shared memory")
