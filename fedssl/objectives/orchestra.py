"""Orchestra: predict the target network's global cluster of an image, and by how many quarter turns it was turned."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..errors import UserError
from ..models.model import Model, mlp_head
from .base import Objective, Step


class OrchestraModel(Model):
    """Encoder, projector and rotation classifier, a target network of the first two, and two tables of vectors.

    Buffers:
        centroids: the global clusters from the server, unit rows, [clusters, d].
        memory: the target network's last projections, unit rows, oldest first, [memory, d]; the client's own.
    """

    centroids: Tensor
    memory: Tensor

    def __init__(self, online: dict[str, nn.Module], features: int, clusters: int, memory: int):
        super().__init__(online, target_parts=("encoder", "projector"))
        self.register_buffer("centroids", F.normalize(torch.randn(clusters, features), dim=1))
        self.register_buffer("memory", torch.zeros(memory, features))

    @torch.no_grad()
    def remember(self, projections: Tensor) -> None:
        """Append unit projections [n, d] to the memory and remove the oldest."""
        self.memory.copy_(torch.cat([self.memory, projections])[-len(self.memory) :])


def cluster_loss(online: Tensor, target: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """Return the mean of -sum_c p_c log q_c; p and q are softmax(z C' / temperature), z of target and online.

    online, target: unit rows [n, d]; centroids: unit rows [c, d].
    """
    target_clusters = F.softmax(target @ centroids.T / temperature, dim=1)
    return -(target_clusters * F.log_softmax(online @ centroids.T / temperature, dim=1)).sum(dim=1).mean()


def turn(images: Tensor) -> tuple[Tensor, Tensor]:
    """Turn image i of [n, C, H, H] by i mod 4 quarter turns; returns the images and the turns, int64 [n]."""
    turns = torch.arange(len(images), device=images.device) % 4
    turned = torch.stack([torch.rot90(image, i % 4, dims=(1, 2)) for i, image in enumerate(images)])
    return turned, turns


class Orchestra(Objective):
    """Lubana et al. 2022, Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, section 4.

        `cluster_loss`(online projection of view 2, target projection of view 1) + cross-entropy of the quarter turns

    The defaults are those of the authors' released code. The target's momentum is on parameters only, and the projector
    ends in a BatchNorm without weights. The target network starts a round from the clients' mean, see
    `orchestra_clusters`. An untrained network has a `loss` near log(128) + log(4).

    Deviations from the released code: turns are not drawn: each has an equal share of the batch, by the images'
    (random) positions. The target network moves after the step and not before the loss. All views have the recipe's
    augmentation (the code solarises some). The code also computes online outputs of view 1 and does not use them.
    """

    needs_aggregator = "orchestra_clusters"
    views: ClassVar[int] = 3
    online_views: ClassVar[int] = 1

    clusters: int = Field(128, ge=2, description="number of global clusters")
    memory: int = Field(128, ge=2, description="number of target projections that a client clusters")
    features: int = Field(512, ge=2, description="dimension of the projection and of the projector's hidden layer")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities to the clusters")
    target_momentum: float = Field(0.996, ge=0, le=1, description="share of the target network kept at each step")

    def recorded(self, shape: tuple[int, ...]) -> "Orchestra":
        if shape[1] != shape[2]:
            raise UserError(
                f"orchestra turns images by a quarter, so they must be square, got {shape[1]}x{shape[2]} pixels"
            )
        return self

    def build(self, encoder: nn.Module, classes: int) -> Model:
        size = self.features
        online = {
            "encoder": encoder,
            "projector": mlp_head(encoder.num_features, size, size, last_batch_norm=True),  # type: ignore[arg-type]
            "rotation": nn.Linear(size, 4),
        }
        return OrchestraModel(online, size, self.clusters, self.memory)

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        assert isinstance(model, OrchestraModel)
        representation = model.encoder(views[1])
        projection = model.online["projector"](representation)
        target = F.normalize(model.target_of_views(views[:1])[0], dim=1)
        loss = cluster_loss(F.normalize(projection, dim=1), target, model.centroids, self.temperature)
        turned, turns = turn(views[2])
        loss = loss + F.cross_entropy(model.online["rotation"](model.online["projector"](model.encoder(turned))), turns)
        model.remember(target)
        return Step(loss, (representation,), (projection,), first_view=1)
