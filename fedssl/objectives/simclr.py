"""SimCLR: identify an image's other view among all views of the batch."""

from pydantic import Field
from torch import Tensor, nn

from fedkernels import nt_xent

from ..models.model import Model, with_projector
from .base import Objective, Step


class SimCLR(Objective):
    """Chen et al. 2020, A Simple Framework for Contrastive Learning of Visual Representations, Eq. 1.

    A row's similarity to itself is left out as -inf, as in the paper. (FedU2's released code sets it to 0.) The
    projector has two layers, 2048 -> 128 (section 4.2; ResNet-50's output has 2048 features), with BatchNorm as in
    their code. The temperature 0.5 is the best on CIFAR-10 (appendix B.9). FedU2 has 2048 -> 512, and its code 0.07.
    LW-FedSSL prints one temperature, 0.05, which its preset has for SimCLR too.
    """

    hidden_features: int = Field(2048, ge=1, description="width of the projector's hidden layers")
    output_features: int = Field(128, ge=1, description="dimension of the projections")
    projector_layers: int = Field(2, ge=1, description="linear layers of the projector; LW-FedSSL has three")
    temperature: float = Field(0.5, gt=0, description="divides the cosine similarities")

    def build(self, encoder: nn.Module, classes: int) -> Model:
        return with_projector(encoder, self.hidden_features, self.output_features, self.projector_layers)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, projections = model.outputs_of_views(views)
        first, second = map(model.unit_rows, projections)
        loss = nt_xent(first, second, self.temperature)
        return Step(loss, representations, projections)
