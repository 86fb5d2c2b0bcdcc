"""L-DAWA's cosines and means, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedssl.aggregators.l_dawa import LDawa
from fedssl.messages import Message


def test_l_dawa_scales_each_tensor_by_its_cosine_and_averages_statistics_by_samples():
    """Global (1, 0). cos((2, 0)) = 1, cos((3, 4)) = 3/5: w = ((2, 0) + 0.6 (3, 4)) / 2 = (1.9, 1.2).

    Samples 1 and 3: running mean (1 + 3 * 5) / 4 = 4, counter (3 + 3 * 8) / 4 = 6.75 -> 7.
    The bias was 0 and has no angle: (2 + 4) / 2 = 3. Mean cosines: (1 + 1) / 2 and (0.6 + 1) / 2.
    """
    server = Message(
        {
            "online.w": torch.tensor([1.0, 0.0]),
            "online.b": torch.tensor([0.0]),
            "online.bn.running_mean": torch.tensor([0.0]),
            "online.bn.num_batches_tracked": torch.tensor(0),
        }
    )
    weights = {0: ([2.0, 0.0], 2.0, 1.0, 3, 1), 1: ([3.0, 4.0], 4.0, 5.0, 8, 3)}
    replies = {
        k: Message(
            {
                "online.w": torch.tensor(w),
                "online.b": torch.tensor([b]),
                "online.bn.running_mean": torch.tensor([mean]),
                "online.bn.num_batches_tracked": torch.tensor(count),
            },
            {"samples": samples},
        )
        for k, (w, b, mean, count, samples) in weights.items()
    }
    part = LDawa(name="l_dawa", plain_rounds=1)
    plain = part.aggregate(server, replies)
    assert plain.numbers == {"l_dawa.rounds": 1}
    torch.testing.assert_close(plain.tensors["online.w"], torch.tensor([(2 + 3 * 3) / 4, 3 * 4 / 4]))
    server.numbers.update(plain.numbers)
    state = part.aggregate(server, replies)
    torch.testing.assert_close(state.tensors["online.w"], torch.tensor([1.9, 1.2]))
    torch.testing.assert_close(state.tensors["online.b"], torch.tensor([3.0]))
    torch.testing.assert_close(state.tensors["online.bn.running_mean"], torch.tensor([4.0]))
    assert state.tensors["online.bn.num_batches_tracked"] == 7
    assert state.numbers == {"l_dawa.rounds": 2}
    shares = {"l_dawa_share/0": 0.5, "l_dawa_share/1": 0.4}
    distance = {"local_model_distance/global": math.hypot(2 - 3, 0 - 4, 2 - 4)}
    assert state.metrics == pytest.approx({"l_dawa_cosine/0": 1.0, "l_dawa_cosine/1": 0.8} | shares | distance)
