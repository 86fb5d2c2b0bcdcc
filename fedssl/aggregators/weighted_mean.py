"""The mean of the clients' weights, by their numbers of samples."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..client import LocalRound
from ..messages import Message
from ..models.model import Model
from .base import Aggregator


def weighted_mean(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """sum_k w_k t_k / sum_k w_k, computed in float64 and returned in the tensors' dtype; integers are rounded.

    A float mean of an integer buffer (BatchNorm's num_batches_tracked) could not be loaded.
    """
    total = sum(weights)
    mean = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        mean.add_(tensor.to(torch.float64), alpha=weight / total)
    if not tensors[0].is_floating_point():
        mean = mean.round()
    return mean.to(tensors[0].dtype)


def is_statistic(name: str, tensor: Tensor) -> bool:
    """Whether a model's entry is no weight but a running statistic of BatchNorm, or an integer such as its counter."""
    return not tensor.is_floating_point() or name.rpartition(".")[2] in ("running_mean", "running_var")


class WeightedMean(Aggregator):
    """FedAvg (McMahan et al. 2017, Algorithm 1): theta = sum_k n_k theta_k / sum_k n_k over those who answered.

    Parameters, running statistics and integer buffers are all averaged. Only the entries that travel in a round change.
    """

    exchanges_weights: ClassVar[bool] = True

    def initial_state(self, model: Model | None) -> Message:
        assert model is not None
        return Message({name: tensor for name, tensor in model.state_dict().items() if name.startswith("online.")})

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        message = Message({name: server.tensors[name] for name in travelling})
        return dict.fromkeys(clients, message)

    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        state = local.client.model.state_dict()
        return Message({name: state[name] for name in travelling})

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        order = sorted(replies)
        weights = [replies[k].numbers["samples"] for k in order]
        names = [name for name in replies[order[0]].tensors if name in server.tensors and name.startswith("online.")]
        return Message({name: weighted_mean([replies[k].tensors[name] for k in order], weights) for name in names})
