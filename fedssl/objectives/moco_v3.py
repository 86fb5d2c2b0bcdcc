"""MoCo v3: identify the target network's projection of an image's other view among those of the whole batch."""

from pydantic import Field
from torch import Tensor, nn

from fedkernels import info_nce

from ..models.model import Model, mlp_head
from .base import Objective, Step


class MoCoV3(Objective):
    """Chen, Xie & He 2021, An Empirical Study of Training Self-Supervised Vision Transformers, Algorithm 1, in the form
    of LW-FedSSL's Algorithm 2 and Eq. 2:

        loss = info_nce(q1, k2, temperature) + info_nce(q2, k1, temperature)

    q are the l2-normalised predictions of the online network, k the l2-normalised projections of the target network.
    The negatives are the other images of the batch. The defaults are LW-FedSSL's (section 4.1), as are the projector's
    three layers, the predictor's two, and a momentum that stays constant.

    What LW-FedSSL leaves open follows Chen et al.'s released code for vision transformers: BatchNorm before each ReLU
    and, without weight and bias, after each head's last layer. (For ResNets that code has a projector of two layers and
    no BatchNorm after the predictor.) Where LW-FedSSL differs from that code, this follows LW-FedSSL: the patch
    embedding trains, the target network moves after the step and not before the loss, and the loss has no factor
    2 * temperature. `fresh_target_each_round` is LW-FedSSL's Algorithm 2, line 4. Otherwise a client keeps its target.
    """

    hidden_features: int = Field(512, ge=1, description="width of the heads' hidden layers")
    output_features: int = Field(256, ge=1, description="dimension of projections and predictions")
    temperature: float = Field(0.05, gt=0, description="tau; divides the cosine similarities")
    target_momentum: float = Field(0.99, ge=0, le=1, description="mu; share of the target network kept at each step")
    fresh_target_each_round: bool = Field(
        True, description="whether the target network starts each round as a copy of the online one"
    )

    def build(self, encoder: nn.Module, classes: int) -> Model:
        hidden, out = self.hidden_features, self.output_features
        online = {
            "encoder": encoder,
            "projector": mlp_head(encoder.num_features, hidden, out, layers=3, last_batch_norm=True),  # type: ignore[arg-type]
            "predictor": mlp_head(out, hidden, out, layers=2, last_batch_norm=True),
        }
        return Model(online, target_parts=("encoder", "projector"))

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections, predictions = model.outputs_of_views(views)
        first, second = map(model.unit_rows, predictions)
        first_key, second_key = map(model.unit_rows, model.target_of_views(views))
        loss = info_nce(first, second_key, self.temperature) + info_nce(second, first_key, self.temperature)
        return Step(loss, representations, projections, predictions)
