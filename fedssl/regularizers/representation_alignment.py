"""MOON's model contrast: nearer to the global model's representation than to the client's previous one."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..models.model import frozen_copy
from ..models.stages import StagedEncoder
from ..objectives.base import Step
from .base import Regularizer, StepLoss

STAGE = "representation_alignment.stage"


def model_contrast(now: Tensor, towards: Tensor, away: Tensor, temperature: float) -> Tensor:
    """Return -log(exp(cos(z, g) / t) / (exp(cos(z, g) / t) + exp(cos(z, p) / t))), mean over rows; inputs [n, d]."""
    difference = F.cosine_similarity(now, away, dim=-1) - F.cosine_similarity(now, towards, dim=-1)
    return F.softplus(difference / temperature).mean()


class RepresentationAlignment(Regularizer):
    """MOON (Li, He & Song 2021, Model-Contrastive Federated Learning, Eq. 3): weight * `model_contrast`, the mean over
    the views. It compares each image's projection with that of the received global model and with that of the client's
    own model at the end of its previous round.

    LW-FedSSL's representation alignment (RA, section 4.6) cites MOON and prints neither equation nor constants. The
    defaults are MOON's: temperature 0.5, and weight 1 (mu, tuned there among 0.1, 1, 5 and 10). Both other models are
    frozen and run in evaluation mode, as in MOON's released code.

    In a client's first round, and in its first round of a stage, there is no previous model of that depth, so the term
    is 0. Final layers are the same in all three models, so each view passes through them once. Logs `alignment_loss`,
    the term without its weight, where the term is not 0.
    """

    needs_global_model = True
    needs_previous_model = True
    needs_head = "projector"

    weight: float = Field(1.0, ge=0, description="mu, the factor of the term")
    temperature: float = Field(0.5, gt=0, description="tau; divides the cosine similarities")

    def start_round(self, local: LocalRound) -> StepLoss:
        model, memory = local.client.model, local.client.memory.numbers
        depth = model.encoder.depth if isinstance(model.encoder, StagedEncoder) else 1
        earlier_depth, memory[STAGE] = memory.get(STAGE), depth
        if earlier_depth != depth or local.previous is None:
            return lambda step: step.loss.new_zeros(())
        received_model = frozen_copy(model, local.received.tensors)
        previous_model = frozen_copy(model, local.previous)
        if isinstance(model.encoder, StagedEncoder):
            model.encoder.share_frozen_outputs(received_model[0], previous_model[0])

        def term(step: Step) -> Tensor:
            with torch.no_grad():
                towards = [received_model(view) for view in step.online_views]
                away = [previous_model(view) for view in step.online_views]
            views = zip(step.projections, towards, away, strict=True)
            losses = [model_contrast(z, g, p, self.temperature) for z, g, p in views]
            loss = sum(losses[1:], losses[0]) / len(losses)
            local.log("alignment_loss", loss.detach())
            return self.weight * loss

        return term
