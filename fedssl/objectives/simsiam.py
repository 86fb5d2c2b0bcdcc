"""SimSiam: predict the other view's projection, with a stop-gradient and no target network."""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.model import Model, mlp_head
from .base import Objective, Step


class SimSiam(Objective):
    """Chen & He 2020, Exploring Simple Siamese Representation Learning, Eq. 2.

    As in their section 3, the projector has three layers and ends in BatchNorm, and the predictor has a bottleneck.
    With `stop_gradient: false` the representations collapse (their section 4.1); the option is there to study that.
    """

    output_features: int = Field(2048, ge=1, description="dimension of projections and predictions")
    bottleneck_features: int = Field(512, ge=1, description="width of the predictor's hidden layer")
    stop_gradient: bool = Field(True, description="whether the targets are without gradient; without it they collapse")

    def build(self, encoder: nn.Module, classes: int) -> Model:
        size = self.output_features
        online = {
            "encoder": encoder,
            "projector": mlp_head(encoder.num_features, size, size, layers=3, last_batch_norm=True),  # type: ignore[arg-type]
            "predictor": mlp_head(size, self.bottleneck_features, size),
        }
        return Model(online)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections, predictions = model.outputs_of_views(views)
        targets = tuple(p.detach() for p in projections) if self.stop_gradient else projections
        similarity = F.cosine_similarity(predictions[0], targets[1], dim=-1)
        similarity = similarity + F.cosine_similarity(predictions[1], targets[0], dim=-1)
        return Step(-similarity.mean() / 2, representations, projections, predictions)
