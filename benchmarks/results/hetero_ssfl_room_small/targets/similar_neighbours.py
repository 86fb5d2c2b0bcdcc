"""KL of softmax similarities between public images, the mean kernel's as target."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedssl.aggregators.representation_mean import FACTOR, KERNEL, WHITENING
from fedssl.client import LocalRound
from fedssl.data.batches import endless_batches
from fedssl.data.pixels import normalize
from fedssl.models.model import untouched_running_statistics
from fedssl.objectives.base import Step
from fedssl.regularizers.base import Regularizer, StepLoss


def neighbour_loss(similarity: Tensor, target: Tensor, temperature: float) -> Tensor:
    n = len(similarity)
    off = ~torch.eye(n, dtype=torch.bool)
    s = F.log_softmax(similarity[off].view(n, n - 1) / temperature, dim=1)
    t = F.log_softmax(target[off].view(n, n - 1) / temperature, dim=1)
    return F.kl_div(s, t, log_target=True, reduction="batchmean")


def cosines(k: Tensor) -> Tensor:
    d = k.diagonal().clamp_min(1e-12).rsqrt()
    return k * d * d[:, None]


class SoftNeighbours(Regularizer):
    needs_public_images: ClassVar[bool] = True
    needs_aggregator: ClassVar[str | None] = None
    weight: float = Field(1.0, ge=0)
    batch_size: int = Field(100, ge=2)
    temperature: float = Field(0.1, gt=0)
    whiten: bool = True

    def start_round(self, local: LocalRound) -> StepLoss:
        received, client = local.received, local.client
        model, public = client.model, client.public_images
        assert public is not None
        layer = received.config["alignment.layer"]
        factor, kernel = received.tensors.get(FACTOR), received.tensors.get(KERNEL)
        whitening = client.memory.tensors.get(WHITENING) if self.whiten else None
        batches = endless_batches(len(public), self.batch_size, local.generator("soft"))
        if factor is not None and received.config["alignment.centered"]:
            factor = factor - factor.mean(dim=0)

        def term(step: Step) -> Tensor:
            if factor is None and kernel is None:
                return torch.zeros(())
            rows = next(batches)
            with untouched_running_statistics(model):
                x = model.represent(normalize(public[rows]), layer)  # type: ignore[arg-type]
            if whitening is not None:
                x = x @ whitening
            if received.config["alignment.centered"]:
                x = x - x.mean(dim=0)
            if factor is not None:
                target = factor[rows] @ factor[rows].T
            else:
                assert kernel is not None
                target = kernel[rows][:, rows]
            loss = neighbour_loss(F.normalize(x, dim=1) @ F.normalize(x, dim=1).T, cosines(target), self.temperature)
            local.log("soft", loss.detach())
            return self.weight * loss

        return term
