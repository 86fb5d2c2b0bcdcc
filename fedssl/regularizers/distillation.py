"""Distillation beside another objective: find images as similar as a frozen teacher does."""

from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..objectives.base import Step
from ..teacher import TaughtPart, cosines, similarity_loss
from .base import Regularizer, StepLoss


class DistillationTerm(TaughtPart, Regularizer):
    """`similarity_loss` of the encoder's outputs and a frozen teacher's, on the first view of the online network.

    It needs no projector; see objective `distillation` for the source. Logs `distillation_loss`, the term without its
    weight.
    """

    weight: float = Field(1.0, ge=0, description="factor of the term")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities")

    def start_round(self, local: LocalRound) -> StepLoss:
        def term(step: Step) -> Tensor:
            target = cosines(self.teacher_outputs(step.online_views[0]))
            loss = similarity_loss(cosines(step.representations[0]), target, self.temperature)
            local.log("distillation_loss", loss.detach())
            return self.weight * loss

        return term
