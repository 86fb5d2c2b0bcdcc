"""Weighted k-nearest-neighbour accuracy: how near samples of one class lie to each other, without any training."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from .features import require_finite

# Similarities held at a time: 64 MiB in float32, whatever the size of the test set.
_SIMILARITIES_AT_A_TIME = 16 * 2**20


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    neighbors: int = 20,
    temperature: float = 0.1,
) -> float:
    """Accuracy of the weighted nearest-neighbour classifier of Wu et al. 2018 (section 3.4), in percent.

    Each of the `neighbors` training samples of highest cosine similarity s to a test sample votes for its
    class with weight exp(s / temperature). The class with the highest sum wins, and of equal ones that with the
    lowest index. With fewer training samples than `neighbors`, all of them vote. A zero vector has similarity 0 to
    everything.

    Wu et al. use 200 neighbours and temperature 0.07 on ImageNet; the defaults here suit small training sets.

    Args:
        train_features: floating point [n, d], finite.
        train_labels: integer [n], at least 0.
        test_features: floating point [m, d], finite.
        test_labels: integer [m], at least 0.
        neighbors: number of voters, at least 1.
        temperature: above 0; a lower one gives the nearest samples more weight.

    Returns:
        Percentage of the m test samples that are classified correctly, 0 to 100.

    Raises:
        UserError: a feature is not finite, or an option is out of range.
    """
    require_finite("train_features", train_features)
    require_finite("test_features", test_features)
    if neighbors < 1:
        raise UserError(f"neighbors: expected at least 1, got {neighbors}")
    if not temperature > 0:
        raise UserError(f"temperature: expected above 0, got {temperature}")

    dtype = torch.promote_types(torch.promote_types(train_features.dtype, test_features.dtype), torch.float32)
    device = train_features.device
    keys = F.normalize(train_features.to(dtype), dim=1)
    queries = F.normalize(test_features.to(device, dtype), dim=1)
    key_labels = train_labels.to(device, torch.int64)
    classes = int(key_labels.max()) + 1
    voters = min(neighbors, len(keys))
    chunk = max(1, _SIMILARITIES_AT_A_TIME // len(keys))

    correct = 0
    for query, label in zip(queries.split(chunk), test_labels.to(device).split(chunk), strict=True):
        similarity, index = (query @ keys.T).topk(voters, dim=1)
        # The first is the highest; relative to it the weights cannot overflow, and the winner is the same.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = torch.zeros(len(query), classes, dtype=dtype, device=device)
        votes.scatter_add_(1, key_labels[index], weight)
        correct += int((votes.argmax(dim=1) == label).sum())
    return 100.0 * correct / len(queries)
