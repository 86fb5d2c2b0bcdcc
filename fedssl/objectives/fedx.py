"""FedX's networks and its first loss: SimCLR with a predictor for the regularizers that distil."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedkernels import nt_xent

from ..models.heads import mlp_head
from ..models.model import Model
from .base import Objective, Step


class FedX(Objective):
    """nt_xent of the projections of two views (Han et al. 2022, FedX, the local contrastive loss).

    The predictor has no part in this loss: `global_distillation` trains it. Heads as in the authors' released code: two
    linear layers of 256 with a ReLU between, without BatchNorm. Temperature 0.1.
    """

    output_features: int = Field(256, ge=1)
    temperature: float = Field(0.1, gt=0)

    def build(self, encoder: nn.Module, classes: int) -> Model:
        size = self.output_features
        return Model(
            {
                "encoder": encoder,
                "projector": mlp_head(encoder.num_features, size, size, batch_norm=False),  # type: ignore[arg-type]
                "predictor": mlp_head(size, size, size, batch_norm=False),
            }
        )

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations = tuple(model.encoder(view) for view in views)
        projections = tuple(model.online["projector"](r) for r in representations)
        predictions = tuple(model.online["predictor"](p) for p in projections)
        first, second = (F.normalize(p, dim=1) for p in projections)
        return Step(nt_xent(first, second, self.temperature), representations, projections, predictions)
