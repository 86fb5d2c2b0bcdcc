"""L-DAWA: each client's layer is weighted by the cosine of its angle to the global layer."""

import torch
from pydantic import Field
from torch import Tensor

from ..messages import Message
from .weighted_mean import WeightedMean, is_statistic, measure_distance, model_entries, weighted_mean

ROUNDS = "l_dawa.rounds"


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors, computed in float64; 1 if either is zero."""
    a, b = a.to(torch.float64).flatten(), b.to(torch.float64).flatten()
    norms = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return min(1.0, max(-1.0, float(a @ b) / norms)) if norms > 0 else 1.0


class LDawa(WeightedMean):
    """Layer-wise divergence aware weight aggregation (Rehman et al. 2023, L-DAWA, section 3).

    Each tensor w of the model is averaged over the K clients that answered:

        w = (1/K) sum_k cos(w_k, w_g) w_k        w_g: the global tensor that the clients started from

    As in the authors' released code there is no division by the sum of the cosines, so a layer shrinks where clients
    diverge. In the first rounds weights are averaged by samples instead, as the first global model is random.

    Deviations from the released code: it also scales BatchNorm's running statistics by their cosines; here running
    statistics and integers are averaged by samples in every round. Where a client's or the global tensor is zero there
    is no angle, and the factor is 1; the code divides by zero where the global tensor is zero. Two rounds are plain by
    default; a comparison in the released script makes it three. Logs two numbers of each client: `l_dawa_cosine`, the
    mean of its cosines over the tensors, and `l_dawa_share`, the mean of its factors cos(w_k, w_g) / K, which sum to
    less than 1 where clients diverge.
    """

    plain_rounds: int = Field(2, ge=0, description="number of first rounds in which weights are averaged by samples")

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        number = server.numbers.get(ROUNDS, 0) + 1
        if number <= self.plain_rounds:
            state = super().aggregate(server, replies)
            state.numbers[ROUNDS] = number
            return state
        order = sorted(replies)
        samples = [replies[k].numbers["samples"] for k in order]
        state = Message(numbers={ROUNDS: number})
        cosines = []  # of each weight, one a client
        for name in model_entries(server, replies):
            tensors = [replies[k].tensors[name] for k in order]
            if is_statistic(name, tensors[0]):
                state.tensors[name] = weighted_mean(tensors, samples)
            else:
                cosines.append([cosine(tensor, server.tensors[name]) for tensor in tensors])
                state.tensors[name] = weighted_mean(tensors, cosines[-1], len(tensors))
        for k, values in zip(order, zip(*cosines, strict=True), strict=True):
            state.metrics[f"l_dawa_cosine/{k}"] = sum(values) / len(values)
            state.metrics[f"l_dawa_share/{k}"] = sum(values) / len(values) / len(order)
        state.metrics |= measure_distance(server, replies)
        return state
