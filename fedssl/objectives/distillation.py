"""Distillation: learn the features of a frozen teacher, from the client's own images."""

from typing import ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..models.model import Model, mlp_head
from ..teacher import TaughtPart, cosines, similarity_loss
from .base import Objective, Step


class Distillation(TaughtPart, Objective):
    """A student of any architecture learns from a frozen teacher; both see the same view of an image.

    With loss `features` it is 1 - cos(projector(student), teacher), mean over images: the features of Romero et al.
    2015, FitNets, section 2.2, but of the last layer, and of length 1, as teachers' features differ in size. That is
    half of their squared distance. Smooth L1 of such features would be the same divided by their number, so it is
    not an option. The projector travels.

    With loss `similarities` it is `similarity_loss`, without a projector: Eq. 1 and 2 of Koohpayegani et al. 2020,
    CompRess: Self-Supervised Learning by Compressing Representations, over the other images of the batch where the
    paper has a queue of earlier ones, and with one temperature for both networks.
    """

    views: ClassVar[int] = 1

    loss: Literal["features", "similarities"] = Field(
        "features", description="what the student learns: the teacher's features, or how similar it finds images"
    )
    projector_layers: int = Field(1, ge=1, description="linear layers to the teacher's features (loss features)")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities (loss similarities)")
    teacher_features: int | None = Field(
        None, ge=1, description="the teacher's width; a run records it, so that its models need no teacher"
    )

    def build(self, encoder: nn.Module, classes: int) -> Model:
        online = {"encoder": encoder}
        if self.loss == "features":
            assert self.teacher_features is not None, "`recorded` sets it"
            width: int = encoder.num_features  # type: ignore[assignment]
            online["projector"] = mlp_head(width, self.teacher_features, self.teacher_features, self.projector_layers)
        return Model(online)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations, *projections = model.outputs_of_views(views)
        target = self.teacher_outputs(views[0])
        if self.loss == "similarities":
            loss = similarity_loss(cosines(representations[0]), cosines(target), self.temperature)
            return Step(loss, representations)
        loss = (1.0 - F.cosine_similarity(projections[0][0], target, dim=1)).mean()
        return Step(loss, representations, projections[0])
