"""What is measured of a run's models, and when."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..options import Options
from .fine_tune import FineTuneOptions
from .linear import LinearOptions


class EvaluationOptions(Options):
    """What is measured, and when. kNN and linear evaluation use the labelled training images."""

    every: int = Field(0, ge=0, description="rounds between kNN evaluations; 0 evaluates before and after training")
    neighbors: int = Field(20, ge=1, description="training images that vote in the kNN evaluation")
    temperature: float = Field(
        0.1, gt=0, description="of the kNN votes; a lower one gives the nearest images more weight"
    )
    linear: LinearOptions = Field(LinearOptions(), description="the linear evaluation after training")
    semi_supervised: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=list,
        description="labelled fractions to fine-tune on after training; 0.01 and 0.1 in the papers",
    )
    fine_tune: FineTuneOptions | None = Field(
        None, description="fine-tune on all labels after training, as LW-FedSSL does; {} for its options"
    )
