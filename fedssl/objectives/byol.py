"""BYOL: predict the target network's projection of another view."""

from __future__ import annotations

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.heads import mlp_head
from ..models.model import Model
from .base import Objective, Step


def regression_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over the batch of |p/|p| - z/|z||^2 = 2 - 2 cos(p, z). Inputs [n, d], result a scalar."""
    return 2.0 - 2.0 * F.cosine_similarity(prediction, target, dim=-1).mean()


class BYOL(Objective):
    """Grill et al. 2020, Bootstrap Your Own Latent, Eq. 2; the local loss of Hetero-SSFL (section 3.2).

    The target network is the encoder and projector, moved towards the online ones after each step. It is the
    client's own: it never travels. Defaults of the heads and of the momentum are FedU's and FedEMA's
    (4096 -> 2048, 0.99, kept constant; Grill et al. raise it to 1 over training).

    Under the schedule `end_to_end` (FedBYOL) a client's target network goes on from its last round; under `layer_wise`
    and `progressive` it starts every round as a copy of the online one (LW-FedSSL, Algorithm 2, line 4). So results
    with BYOL under the one and the others differ in that too.

    `symmetric` feeds each view to both networks, as Grill et al. do. Hetero-SSFL prints one direction, which
    costs half; `symmetric: false` is that. With both, the loss is the mean of the two directions, where Grill et al.
    take their sum: added terms weigh double beside it, and a rate of plain SGD half, against code that sums.
    """

    hidden_features: int = Field(4096, ge=1)
    output_features: int = Field(2048, ge=1)
    projector_layers: int = Field(2, ge=1, description="LW-FedSSL has three")
    target_momentum: float = Field(0.99, ge=0, le=1)
    symmetric: bool = True

    @property
    def online_views(self) -> int:
        return 2 if self.symmetric else 1

    def build(self, encoder: nn.Module, classes: int) -> Model:
        width: int = encoder.num_features  # type: ignore[assignment]
        online = {
            "encoder": encoder,
            "projector": mlp_head(width, self.hidden_features, self.output_features, self.projector_layers),
            "predictor": mlp_head(self.output_features, self.hidden_features, self.output_features),
        }
        return Model(online, target_parts=("encoder", "projector"))

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        online = views if self.symmetric else views[:1]
        representations = tuple(model.encoder(view) for view in online)
        projections = tuple(model.online["projector"](r) for r in representations)
        predictions = tuple(model.online["predictor"](p) for p in projections)
        targets = (views[1], views[0]) if self.symmetric else (views[1],)
        loss = sum(
            regression_loss(prediction, model.target_project(view))
            for prediction, view in zip(predictions, targets, strict=True)
        )
        assert isinstance(loss, Tensor)
        return Step(loss / len(targets), representations, projections, predictions)

    def after_step(self, model: Model) -> None:
        model.update_target(self.target_momentum)
