"""Join BatchNorm's running statistics so that one bad site cannot move them, and name a site whose own are far off.

No loss shows that they are wrong, as training normalises by its batches. An evaluation does: one site of five whose
means were half a standard deviation off in every layer took 13 points of kNN accuracy on scikit-learn's digits.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .messages import Message

_MEAN, _VARIANCE = ".running_mean", ".running_var"
_ENOUGH = 3  # answers; of two the median is their mean
# docs/when_something_fails.md has the most that honest clients needed
_LEAST_DEVIATIONS = 0.4
_MOST_OF_USUAL = 10.0
_MOST_TIMES = 15.0


def joined_statistics(replies: Mapping[int, Message], everyone: bool) -> tuple[dict[int, Message], dict[int, str]]:
    """Return answers whose running statistics are the entry-wise median, and why some clients' own do not count.

    These are clients whose means are, as root mean square over a tensor, 0.4 standard deviations off the median and ten
    times as far as the median client's, or whose variances are on average fifteen times as large or small. A deviation
    is that of the median variance, of an entry or on average over the tensor, whichever is larger. The statistics of
    the other clients are replaced only if `everyone`: then all count alike, whatever their numbers of images, and no
    client can move a statistic beyond those of the others.
    """
    medians: dict[str, Tensor] = {}
    far: dict[int, str] = {}
    order = sorted(replies)
    names = set.intersection(*(set(reply.tensors) for reply in replies.values())) if len(order) >= _ENOUGH else set()
    for name in sorted(name.removesuffix(_MEAN) for name in names if name.endswith(_MEAN)):
        if name + _VARIANCE not in names:
            continue
        means, variances = (torch.stack([replies[k].tensors[name + end] for k in order]) for end in (_MEAN, _VARIANCE))
        mean, variance = (torch.from_numpy(np.median(values.numpy(), axis=0)) for values in (means, variances))
        medians |= {name + _MEAN: mean, name + _VARIANCE: variance}
        deviation = variance.clamp_min(float(variance.mean())).sqrt()
        off = ((means - mean) / deviation).nan_to_num().square().mean(dim=1).sqrt()
        most = max(_LEAST_DEVIATIONS, _MOST_OF_USUAL * float(off.median()))
        times = (variances.mean(dim=1) / variance.mean()).nan_to_num(1.0)
        for k, deviations, ratio in zip(order, off.tolist(), times.tolist(), strict=True):
            if deviations > most:
                far.setdefault(k, f"{name}{_MEAN} is {deviations:.3g} standard deviations off their median")
            elif not 1 / _MOST_TIMES <= ratio <= _MOST_TIMES:
                far.setdefault(k, f"{name}{_VARIANCE} is on average {ratio:.3g} times their median")
    joined = {k: replace(replies[k], tensors=replies[k].tensors | medians) for k in (order if everyone else far)}
    return {**replies, **joined}, {k: f"its running statistics do not count: {why}" for k, why in far.items()}
