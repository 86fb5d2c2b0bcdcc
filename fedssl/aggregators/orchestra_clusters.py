"""Orchestra's clusters: each client clusters its memory of projections, and the server clusters the clients' centroids.

Source: Lubana et al. 2022 (see objectives/orchestra.py), section 4, with the constants of the authors' released code.
"""

import copy
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..errors import UserError
from ..messages import Message
from ..models.model import Model
from ..objectives.orchestra import OrchestraModel
from .base import Aggregator, Shape, fault_of_unit_rows
from .weighted_mean import means_by_samples

GLOBAL = "centroids"  # the model's own name for them, so that a client's local update loads them
LOCAL = "local_centroids"
ONLINE, TARGET = "online.", "target."
_TARGET_PARTS = (f"{TARGET}encoder.", f"{TARGET}projector.")


class OrchestraClusters(Aggregator):
    """Global clusters of Orchestra (Lubana et al. 2022, section 4, Algorithm 1). It needs the objective `orchestra` and
    an aggregator of the weights.

    As in the authors' released code the clients' target networks are averaged by samples: they travel with the weights,
    which almost doubles the bytes, and a client begins each round with the mean. (The code calls this its stateless
    client: only the memory of projections is its own. With its stateful one, which FedU2's released code has in its
    comparison with Orchestra, a target network stays with its client.)

    A client sends the local centroids of its memory after training, [local_clusters, d]. The server sends the global
    centroids, [clusters, d]. The opening round makes the first ones: clients receive the first global weights, fill
    their memory, cluster it, and do not train.

    As in the authors' released code, there are 16 local clusters by five rounds of equal-size k-means, with sharpness
    25 in Sinkhorn-Knopp. The server takes 500 SGD steps (rate 0.01, momentum 0.9, weight decay 1e-4) at temperature 0.1
    over the centroids of this round's clients, starting from the last global centroids. Deviations: the opening round
    asks all clients and not a sample. The memory is filled from one batch of augmented images, with several views of
    each where a client has fewer images than its memory. Sinkhorn-Knopp stops by the worst row and scales rows last.
    Logs `clusters_used`, the number of global clusters that have a local centroid.
    """

    opening_round: ClassVar[bool] = True
    needs_global_model: ClassVar[bool] = True

    local_clusters: int = Field(16, ge=2, description="centroids that a client sends")
    temperature: float = Field(0.1, gt=0, description="divides the cosine similarities in the server's clustering")
    steps: int = Field(500, ge=1, description="SGD steps of the server's clustering")

    def check_model(self, model: Model) -> None:
        if not isinstance(model, OrchestraModel):
            raise UserError(
                f"{self.name} needs objective orchestra, but the recipe has another one: use objective.name=orchestra"
            )
        if self.local_clusters > len(model.memory):
            raise UserError(
                f"{self.name}.local_clusters is {self.local_clusters}, but objective.memory is only "
                f"{len(model.memory)}: lower local_clusters or raise memory"
            )

    def initial_state(self, model: Model | None) -> Message:
        assert isinstance(model, OrchestraModel)
        return Message({GLOBAL: model.centroids})

    def open(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        return dict.fromkeys(clients, Message({name: server.tensors[name] for name in travelling}))

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        return dict.fromkeys(clients, Message({GLOBAL: server.tensors[GLOBAL]} | target_of(server, travelling)))

    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        model = local.client.model
        assert isinstance(model, OrchestraModel)
        if local.number == 0:
            fill_memory(local, model)
        state = model.state_dict()
        target = {name: state[name] for name in target_of(local.received)}
        generator = local.generator("local clusters")
        return Message({LOCAL: cluster_locally(model.memory.cpu(), self.local_clusters, generator)} | target)

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in target_of(server, travelling).items()}
        shapes[LOCAL] = (self.local_clusters, server.tensors[GLOBAL].shape[1])
        return shapes

    def fault(self, client: int, reply: Message) -> str | None:
        return fault_of_unit_rows(reply, LOCAL)

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        points = torch.cat([replies[k].tensors[LOCAL] for k in sorted(replies)])
        centroids = cluster_globally(points, server.tensors[GLOBAL], self.temperature, self.steps)
        used = len((points @ centroids.T).argmax(dim=1).unique())
        tensors = {GLOBAL: centroids} | self._next_target(server, replies)
        return Message(tensors, metrics={"clusters_used/global": used})

    def _next_target(self, server: Message, replies: dict[int, Message]) -> dict[str, Tensor]:
        """Return the mean of the clients' target networks; after the opening round a copy of the online one."""
        if not target_of(server):
            online = {TARGET + n.removeprefix(ONLINE): t for n, t in server.tensors.items() if n.startswith(ONLINE)}
            return {name: tensor.clone() for name, tensor in online.items() if name.startswith(_TARGET_PARTS)}
        return means_by_samples(replies, target_of(replies[min(replies)]))


def target_of(message: Message, travelling: list[str] | None = None) -> dict[str, Tensor]:
    """Return the target network's entries, or those whose online ones travel; there are none before the first round."""
    target = {name: tensor for name, tensor in message.tensors.items() if name.startswith(TARGET)}
    return {n: t for n, t in target.items() if travelling is None or ONLINE + n.removeprefix(TARGET) in travelling}


@torch.no_grad()
def fill_memory(local: LocalRound, model: OrchestraModel) -> None:
    """Fill a client's memory with target projections of augmented images; BatchNorm's statistics stay as they are."""
    images = local.client.images
    order = torch.randperm(len(images), generator=local.generator("memory"))
    rows = order[torch.arange(len(model.memory)) % len(order)]
    parts = rows.split(len(order))  # more than one where there are fewer images than places
    views = torch.cat([local.views(images[part], part, "memory", n, count=1)[0] for n, part in enumerate(parts)])
    model.remember(F.normalize(copy.deepcopy(model).train().target_of_views((views,))[0], dim=1))


@torch.no_grad()
def equal_assignment(scores: Tensor, iterations: int, sharpness: float = 25.0) -> Tensor:
    """Assign softly by Sinkhorn-Knopp: [n, c] whose rows sum to 1 and whose columns each sum to about n / c.

    They are softmax(sharpness * scores), scores [n, c], with columns and rows scaled in turn. The scaling stops when
    every row sum was within 1 % of 1, and at the latest after `iterations`.
    """
    n, c = scores.shape
    plan = F.softmax(scores * sharpness, dim=1)
    for _ in range(iterations):
        plan = plan * (n / c / plan.sum(dim=0).clamp_min(1e-30))
        rows = plan.sum(dim=1, keepdim=True)
        plan = plan / rows.clamp_min(1e-30)
        if (rows - 1).abs().max() < 1e-2:
            break
    return plan


@torch.no_grad()
def cluster_locally(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Return centroids [clusters, d], unit rows, of unit points [n, d]: five rounds of equal-size k-means.

    The first centroids are random points. The centroid of an empty cluster becomes a random point again.
    """
    n = len(points)
    centroids = points[torch.randperm(n, generator=generator)[:clusters]]
    for _ in range(5):
        chosen = equal_assignment(points @ centroids.T, 10).argmax(dim=1)
        drawn = points[torch.randint(n, (clusters,), generator=generator)]
        members = [points[chosen == i] for i in range(clusters)]
        means = [rows.mean(dim=0) if len(rows) else drawn[i] for i, rows in enumerate(members)]
        centroids = F.normalize(torch.stack(means), dim=1)
    return centroids


def cluster_globally(points: Tensor, centroids: Tensor, temperature: float, steps: int) -> Tensor:
    """Return new global centroids [c, d], unit rows, of the clients' centroids `points` [n, d].

    Each SGD step increases the cosine between the assignment softmax(points C' / temperature) and the equal-size
    assignment of the same scores, and then normalises the centroids.
    """
    centroids = torch.nn.Parameter(centroids.clone())
    optimizer = torch.optim.SGD([centroids], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        scores = points @ centroids.T
        equal_sized = equal_assignment(scores.detach(), 100)
        loss = -F.cosine_similarity(equal_sized, F.softmax(scores / temperature, dim=1), dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            centroids.copy_(F.normalize(centroids, dim=1))
    return centroids.detach()
