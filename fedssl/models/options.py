"""Which weights a run's encoders start from."""

from __future__ import annotations

from pydantic import Field

from ..options import Options


class ModelOptions(Options):
    """What the encoders are before the first round. Projectors and predictors are always drawn at random."""

    weights: str | dict[str, str] | None = Field(
        None,
        description="weights to start the encoders from: a folder of fedssl export, a safetensors or .pt file, or "
        "timm:NAME; for several architectures a mapping from architecture to one of these (default: drawn at random). "
        "Where images of at most 64 pixels give a ResNet a 3x3 stem, a 7x7 stem's weights are left out",
    )
    digests: dict[str, str] | None = Field(
        None,
        description="SHA-256 of the weights by architecture; a run records them, and is not continued with others",
    )

    def source_of(self, architecture: str) -> str | None:
        """Where an architecture's weights come from; None where it starts at random."""
        return self.weights.get(architecture) if isinstance(self.weights, dict) else self.weights
