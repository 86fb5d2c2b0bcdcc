"""FedX's networks and its local contrastive loss; the predictor is for the regularizers that distil."""

from pydantic import Field
from torch import Tensor, nn

from fedkernels import nt_xent

from ..models.model import Model, mlp_head
from .base import Objective, Step


class FedX(Objective):
    """nt_xent of the projections of two views (Han et al. 2022, FedX, the local contrastive loss).

    The predictor has no part in this loss; `global_distillation` trains it. The heads are those of the authors'
    released code: two linear layers of 256 features with a ReLU between them, without BatchNorm.
    """

    output_features: int = Field(256, ge=1, description="dimension of projections, predictions and hidden layers")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities")

    def build(self, encoder: nn.Module, classes: int) -> Model:
        size = self.output_features
        online = {
            "encoder": encoder,
            "projector": mlp_head(encoder.num_features, size, size, batch_norm=False),  # type: ignore[arg-type]
            "predictor": mlp_head(size, size, size, batch_norm=False),
        }
        return Model(online)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections, predictions = model.outputs_of_views(views)
        first, second = map(model.unit_rows, projections)
        return Step(nt_xent(first, second, self.temperature), representations, projections, predictions)
