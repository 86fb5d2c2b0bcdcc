"""A mean that a few bad clients cannot move far: of every entry the largest and the smallest values are left out."""

import torch
from pydantic import Field

from ..messages import Message
from .weighted_mean import WeightedMean, measure_distance, model_entries, weighted_mean


class TrimmedMean(WeightedMean):
    """Coordinate-wise trimmed mean (Yin et al. 2018, Byzantine-robust distributed learning, Definition 2).

    Of the K values of an entry, floor(trim * K) at each end are left out, and the others are averaged. So every entry
    lies between values of honest clients as long as no more than these are bad, whatever they send. All clients count
    alike: a client that states many images would count for more. With `trim` near 1/2 it is the coordinate-wise median.

    Running statistics and integer buffers are trimmed too. Where clients' data differ much, their honest updates differ
    as well, and what is left out is lost: compare with `weighted_mean` first. Logs `local_model_distance`.
    """

    trim: float = Field(
        0.2, ge=0, lt=0.5, description="fraction of the clients that is left out at each end, of every entry for itself"
    )

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        order = sorted(replies)
        cut = min(int(self.trim * len(order) + 1e-9), (len(order) - 1) // 2)  # 0.29 * 100 is 28.999...
        state = Message()
        for name in model_entries(server, replies):
            values = torch.stack([replies[k].tensors[name] for k in order]).sort(dim=0).values
            left = [*values[cut : len(order) - cut]]
            state.tensors[name] = weighted_mean(left, [1.0] * len(left))
        state.metrics = measure_distance(server, replies)
        return state
