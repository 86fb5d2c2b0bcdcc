"""SIGReg as a term beside any objective: projections are drawn towards an isotropic Gaussian."""

import torch
from pydantic import Field
from torch import Tensor

from fedkernels import sigreg

from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss


class SIGReg(Regularizer):
    """weight * mean over views of `fedkernels.sigreg` of the projector's outputs (Balestriero & LeCun 2025, LeJEPA).

    It asks of projections what FedU2's `uniformity` asks, that they spread in all directions, without transport: along
    random directions, new ones in each step, their distribution shall be normal. They are taken as they are and not
    normalised, so their length counts. Logs `sigreg`, the mean over views without the weight.
    """

    needs_head = "projector"

    weight: float = Field(0.01, ge=0, description="factor of the term")
    directions: int = Field(256, ge=1, description="random directions along which each step compares")

    def start_round(self, local: LocalRound) -> StepLoss:
        generator = local.generator("sigreg", local.client.model.device)

        def term(step: Step) -> Tensor:
            features = step.projections[0].shape[1]
            directions = torch.randn(features, self.directions, generator=generator, device=generator.device)
            value = torch.stack([sigreg(z.float(), directions) for z in step.projections]).mean()
            local.log("sigreg", value.detach())
            return self.weight * value

        return term
