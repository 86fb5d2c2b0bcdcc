"""FedCA's use of the dictionary: other clients' projections are further negatives."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedkernels import nt_xent

from ..aggregators.dictionary import DICTIONARY, check_projector
from ..client import LocalRound
from ..models.model import Model
from ..objectives.base import Objective, Step
from .base import Regularizer, StepLoss, require_two_views


def added_negatives(first: Tensor, second: Tensor, dictionary: Tensor, temperature: float) -> Tensor:
    """What NT-Xent of the views gains when the dictionary's rows become negatives of every row, a mean, >= 0.

    With s_i the sum of exp(similarity / temperature) over a row's 2B - 1 others and t_i over the dictionary's rows:
    log(s_i + t_i) - log(s_i). first, second [B, d] and dictionary [m, d] have unit rows. Result a scalar.
    """
    rows = torch.cat([first, second])
    positives = (first * second).sum(dim=1).repeat(2) / temperature
    batch = nt_xent(first, second, temperature, reduction="none") + positives
    return F.softplus(torch.logsumexp(rows @ dictionary.T / temperature, dim=1) - batch).mean()


class DictionaryContrast(Regularizer):
    """`added_negatives` of the projections: with weight 1 and SimCLR's temperature, objective and term together are the
    contrastive loss of FedCA (Zhang et al. 2023, Federated unsupervised representation learning) with the dictionary
    among the negatives. In the first round there is no dictionary and the term is 0.

    The paper's abstract says that the dictionary is shared "for consistency of representation space"; that it enters
    as negatives is how we read it, as there is no released code to ask.
    """

    needs_aggregator: ClassVar[str | None] = "dictionary"

    weight: float = Field(1.0, ge=0)
    temperature: float | None = Field(None, gt=0, description="the objective's where not given")

    def check_objective(self, objective: Objective) -> None:
        require_two_views(self, objective)

    def check_model(self, model: Model) -> None:
        check_projector(self.name, model)

    def start_round(self, local: LocalRound) -> StepLoss:
        dictionary = local.received.tensors.get(DICTIONARY)
        temperature = self.temperature or float(getattr(local.objective, "temperature", 0.5))

        def term(step: Step) -> Tensor:
            if dictionary is None:
                return step.loss.new_zeros(())
            first, second = (F.normalize(p, dim=1) for p in step.projections)
            loss = added_negatives(first, second, dictionary.to(first), temperature)
            local.log("dictionary_loss", float(loss.detach()))
            return self.weight * loss

        return term
