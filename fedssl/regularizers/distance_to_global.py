"""Stay near the received global model, by representations or by weights: the personal models of Per-SSFL and Ditto."""

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss


class DistanceToGlobal(Regularizer):
    """weight / 2 times a squared distance of the client's model from the global model that it received.

    `of: representations` is our reading of Per-SSFL (He et al. 2021, SSFL, arXiv 2110.02470), which regulates "the
    distance between the local and global representations of data" (abstract): the mean over images and views of
    |h / |h| - g / |g||^2, h and g the encoder's outputs of the client's model and of the global one for the same view.
    Neither the equation nor the released code could be read (see the README of `recipes/`). Ours are: the encoder's
    output, not the projector's; l2-normalisation, as SimSiam compares by cosine; the mean over images; and the weight.

    `of: weights` is Ditto's term (Li et al. 2021, Algorithm 1): lambda / 2 |v - w|^2 over the parameters that train,
    heads included. It is one of the variants that the SSFL paper compares Per-SSFL with.

    The global model is frozen and runs in the mode of the client's model, on a copy whose running statistics are thrown
    away: with equal weights the distance of representations is then 0. Logs `global_distance`, the squared distance
    without the factor weight / 2.
    """

    needs_global_model = True

    of: Literal["representations", "weights"] = Field(
        "representations", description="what the distance is measured between: Per-SSFL's or Ditto's"
    )
    weight: float = Field(1.0, ge=0, description="lambda; the term has the factor lambda / 2")

    def start_round(self, local: LocalRound) -> StepLoss:
        model = local.client.model
        received = copy.deepcopy(model).requires_grad_(False)
        received.load_state_dict(local.received.tensors, strict=False)

        def term(step: Step) -> Tensor:
            if self.of == "weights":
                distance = step.loss.new_zeros(())
                for v, w in zip(model.online.parameters(), received.online.parameters(), strict=True):
                    if v.requires_grad:
                        distance = distance + (v - w).square().sum()
            else:
                received.train(model.training)
                with torch.no_grad():
                    towards = [F.normalize(received.encoder(view), dim=1) for view in step.online_views]
                own = [F.normalize(representation, dim=1) for representation in step.representations]
                views = zip(own, towards, strict=True)
                distance = torch.stack([(h - g).square().sum(dim=1).mean() for h, g in views]).mean()
            local.log("global_distance", distance.detach())
            return 0.5 * self.weight * distance

        return term
