"""What is measured of a run's models, and when."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from ..data.options import DataOptions
from ..options import Options
from .fine_tune import FineTuneOptions
from .linear import LinearOptions
from .semi_supervised import SemiSupervisedOptions


class EvaluationOptions(Options):
    """What is measured, and when. kNN and linear evaluation use the labelled training images."""

    every: int = Field(0, ge=0, description="rounds between kNN evaluations; 0 evaluates before and after training")
    neighbors: int = Field(
        20, ge=1, description="training images that vote in the kNN evaluation; 200 in FedU2's and EasyFL's code"
    )
    temperature: float = Field(
        0.1, gt=0, description="of the kNN votes; a lower one gives the nearest images more weight"
    )
    linear: LinearOptions = Field(LinearOptions(), description="the linear evaluation after training")
    semi_supervised: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=list,
        description="labelled fractions to fine-tune on after training; 0.01 and 0.1 in the papers",
    )
    semi_supervised_protocol: SemiSupervisedOptions = Field(
        SemiSupervisedOptions(), description="how to fine-tune on these fractions"
    )
    fine_tune: FineTuneOptions | None = Field(
        None, description="fine-tune on all labels after training, as LW-FedSSL does; {} for its options"
    )
    downstream: dict[str, DataOptions] | None = Field(
        None,
        description="other data to evaluate on before and after training, each with a label of letters and digits; the "
        "measures are called downstream_LABEL_knn and so on",
    )

    @field_validator("downstream")
    @classmethod
    def _labels(cls, downstream: dict[str, DataOptions] | None) -> dict[str, DataOptions] | None:
        for label in downstream or ():
            if not re.fullmatch("[A-Za-z0-9]+", label):
                raise ValueError(f"the label {label!r} must consist of letters and digits")
        return downstream
