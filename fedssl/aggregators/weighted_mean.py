"""The mean of the clients' weights, by their numbers of samples."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from fedkernels import delta_gram

from ..client import LocalRound
from ..messages import Message
from ..models.model import Model
from .base import Aggregator

DISTANCE = "local_model_distance/global"
# A distance below this fraction of the longest update is the rounding of a distance of 0.
_ROUNDING = 1e-6


def weighted_mean(tensors: list[Tensor], weights: list[float], total: float | None = None) -> Tensor:
    """Return sum_k w_k t_k / total, computed in float64, in the tensors' dtype; integers are rounded.

    `total` is sum_k w_k by default.
    A float mean of an integer buffer (BatchNorm's num_batches_tracked) could not be loaded.
    """
    total = sum(weights) if total is None else total
    mean = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        mean.add_(tensor, alpha=weight / total)
    if not tensors[0].is_floating_point():
        mean = mean.round()
    return mean.to(tensors[0].dtype)


def means_by_samples(replies: dict[int, Message], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the mean of the clients' tensors of each name, by their numbers of samples."""
    order = sorted(replies)
    samples = [replies[k].numbers["samples"] for k in order]
    return {name: weighted_mean([replies[k].tensors[name] for k in order], samples) for name in names}


def is_statistic(name: str, tensor: Tensor) -> bool:
    """Return whether a model's entry is a running statistic of BatchNorm or an integer, and so no weight."""
    return not tensor.is_floating_point() or name.rpartition(".")[2] in ("running_mean", "running_var")


def model_entries(server: Message, replies: dict[int, Message]) -> list[str]:
    """Return the names of the model's entries in the answers."""
    return [name for name in replies[min(replies)].tensors if name in server.tensors and name.startswith("online.")]


def distance_metric(gram: Tensor) -> dict[str, float]:
    """Return the metric `local_model_distance`: the mean over all pairs i < j of |theta_i - theta_j|_2.

    `gram` is <delta_i, delta_j>, float64 [K, K]. There is no metric of a single client, nor where all models are the
    same: secure aggregation gives the server nothing but their mean.
    """
    squares = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    rows, columns = torch.triu_indices(len(gram), len(gram), 1, device=gram.device)
    distances = squares[rows, columns].clamp_min(0).sqrt()
    if len(distances) == 0 or distances.max() <= _ROUNDING * gram.diagonal().max().sqrt():
        return {}
    return {DISTANCE: float(distances.mean())}


def measure_distance(server: Message, replies: dict[int, Message]) -> dict[str, float]:
    """Return `distance_metric` of the clients' answers."""
    names = [name for name in model_entries(server, replies) if not is_statistic(name, server.tensors[name])]
    clients = [[replies[k].tensors[name] for name in names] for k in sorted(replies)]
    return distance_metric(delta_gram([server.tensors[name] for name in names], clients)) if names else {}


class WeightedMean(Aggregator):
    """FedAvg (McMahan et al. 2017, Algorithm 1): theta = sum_k n_k theta_k / sum_k n_k over those who answered.

    Parameters, running statistics and integer buffers are all averaged. Only the entries that travel in a round change.

    Logs `local_model_distance`: the L2 distance between the weights of two clients after their training, as the mean
    over all pairs of those who answered. LW-FedSSL (Tun et al. 2024, Figure 6) takes a random client and averages its
    distances to all others, of which this is the expected value. Only weights that travel are compared. Under
    `layer_wise` and `progressive` these are all in which two clients' networks of that stage can differ: the layers
    below came from the server and do not train. There is no such number where the server does not see the clients' own
    weights: under secure aggregation, and under differential privacy, whose noise would be most of it.
    """

    exchanges_weights: ClassVar[bool] = True

    def initial_state(self, model: Model | None) -> Message:
        assert model is not None
        return Message({name: tensor for name, tensor in model.state_dict().items() if name.startswith("online.")})

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        return dict.fromkeys(clients, Message({name: server.tensors[name] for name in travelling}))

    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        state = local.client.model.state_dict()
        return Message({name: state[name] for name in travelling})

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        state = Message(means_by_samples(replies, model_entries(server, replies)))
        state.metrics = measure_distance(server, replies)
        return state
