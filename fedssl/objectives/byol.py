"""BYOL: predict the target network's projection of another view."""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.model import Model, mlp_head
from .base import Objective, Step


class BYOL(Objective):
    """Grill et al. 2020, Bootstrap Your Own Latent, Eq. 2; the local loss of Hetero-SSFL (section 3.2).

        mean over images of |p/|p| - z/|z||^2 = 2 - 2 cos(p, z), p the prediction and z the target of the other view

    The target network has an encoder and a projector, which move towards the online ones after each step. It belongs to
    the client and never travels. The defaults of the heads and of the momentum are FedU's and FedEMA's (Grill et al.
    raise the momentum to 1 over training). Under `end_to_end` (FedBYOL) a client keeps its target network from round to
    round. Under `layer_wise` and `progressive` it starts every round as a copy of the online one (LW-FedSSL, Algorithm
    2, line 4), so results under these schedules differ in that too.

    With `symmetric` both networks receive each view, as in Grill et al. Hetero-SSFL prints one direction, which costs
    half; that is `symmetric: false`. With both directions the loss is their mean, whereas Grill et al. take the sum:
    compared with code that sums, added terms have twice the weight, and a rate of plain SGD has half the effect.
    """

    hidden_features: int = Field(4096, ge=1, description="width of the heads' hidden layers")
    output_features: int = Field(2048, ge=1, description="dimension of projections and predictions")
    projector_layers: int = Field(2, ge=1, description="linear layers of the projector; LW-FedSSL has three")
    target_momentum: float = Field(0.99, ge=0, le=1, description="share of the target network kept at each step")
    symmetric: bool = Field(True, description="whether both views pass through both networks")

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
        representations, projections, predictions = model.outputs_of_views(online)
        targets = model.target_of_views((views[1], views[0]) if self.symmetric else (views[1],))
        losses = [2 - 2 * F.cosine_similarity(p, z, dim=-1).mean() for p, z in zip(predictions, targets, strict=True)]
        return Step(sum(losses[1:], losses[0]) / len(losses), representations, projections, predictions)
