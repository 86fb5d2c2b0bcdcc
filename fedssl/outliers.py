"""Compare a round's answers with each other and the server's state: what honest clients never differ by.

docs/when_something_fails.md has the largest multiples that honest runs were measured to differ by. The limits move with
the server's state, so a model that one bad answer has spoiled a little still takes the next round's honest answers.

BatchNorm's running statistics are joined so that one bad site cannot move them. No loss shows that they are wrong, as
training normalises by its batches. An evaluation does: one site of five whose means were half a standard deviation off
in every layer took 13 points of kNN accuracy on scikit-learn's digits.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median_low

import numpy as np
import torch
from torch import Tensor

from .aggregators.weighted_mean import is_statistic
from .messages import Message

_MOST_OF_WEIGHT = 30.0  # size and change of a weight
_MOST_OF_OTHER = 1000.0  # size and change of a running statistic or a tensor of no model; size of what was zero before
_MOST_OF_UPDATE = 5.0  # length of the change of all weights
_MOST_OF_WHOLE = 2.0  # the same of a network; a longer update counts at a site as one of the median length
#: in the numbers of the server's state: how much a secure mean has changed the weights for its rate, and how many
_MEAN_CHANGE, _MEAN_WEIGHTS = "secure mean/change for rate", "secure mean/changed weights"
_ENOUGH = 3  # answers; the lower median of two is the smaller one
# of running statistics; docs/when_something_fails.md has the most that honest clients needed
_MEAN, _VARIANCE = ".running_mean", ".running_var"
_LEAST_DEVIATIONS = 0.4
_MOST_OF_USUAL = 10.0
_MOST_TIMES = 15.0

#: by tensor its root mean square and its largest magnitude
_Sizes = dict[str, tuple[float, float]]
#: a client, what is compared of its answer, its value and the largest value that is accepted
_Comparison = tuple[int, str, float, float]
_MEASURES = ("as root mean square", "in magnitude")


def outliers(
    server: Message, replies: Mapping[int, Message], images: Mapping[int, float], rate: float
) -> dict[int, str]:
    """Return why answers are refused whose tensors, or whose changes of the server's tensors, are far too large.

    Tensors are compared by root mean square and by largest magnitude. A weight may be 30 times and a running statistic
    1000 times as large as the server's and as the median of the answers (of two in the middle the lower one), whichever
    is larger; a weight that was zero 1000 times the median. All weights together may not become 30 times smaller.
    A secure mean may change the weights five times as much, for the learning rate, as that of the round before, if the
    same weights travel. (The rate rises where a run goes on after its cosine.)
    From three answers on, the change of a tensor since the server's state may be these multiples of the median change
    of this tensor, or of all weights, and the change of all weights 5 times its median. A client with more images than
    the median takes more steps: its limits are higher by that factor.

    Args:
        server: its state before the round.
        replies: by client; valid in all else. If all share their tensors they count as one answer: under secure
            aggregation each is the clients' mean.
        images: by which each of these clients counts.
        rate: the round's learning rate.
    """
    alone = len({id(reply.tensors) for reply in replies.values()}) == 1
    factors = _factors(replies, images)
    compared = [*compared_sizes(server, replies, factors, alone)]
    change, before = change_of_mean(server, replies, rate), server.numbers
    if change and change[_MEAN_WEIGHTS] == before.get(_MEAN_WEIGHTS):
        what = "under secure aggregation the clients' mean has changed the weights, after the round before it, by"
        now, last = rate * change[_MEAN_CHANGE], rate * before[_MEAN_CHANGE]
        compared += [(k, what, now, _MOST_OF_UPDATE * last) for k in replies]
    if len(replies) >= _ENOUGH and not alone:
        compared += compared_changes(server, replies, factors)
    reasons: dict[int, str] = {}
    for client, what, value, most in compared:
        if value > most > 0:
            than = "" if "smaller" in what else ", far above the server's and the round's median"
            reason = f"{what} {value:.3g}{than}: expected at most {most:.3g}"
            reasons.setdefault(client, reason)
    return reasons


def change_of_mean(server: Message, replies: Mapping[int, Message], rate: float) -> dict[str, float]:
    """Return numbers for the server's next state where several clients' answers are one mean, see `outliers`."""
    if len(replies) < 2 or len({id(reply.tensors) for reply in replies.values()}) > 1:
        return {}
    changes, counts = _sizes(replies[min(replies)], server), _counts_of_weights(server)
    weights = float(sum(counts.get(n, 0) for n in changes))
    return {_MEAN_CHANGE: _typical(changes, counts) / rate, _MEAN_WEIGHTS: weights}


def weight_changes(server: Message, replies: Mapping[int, Message], network: str = "") -> dict[int, float]:
    """Return by client the root mean square of the change of its weights, of one network or of all.

    Empty with fewer than three answers, which say nothing of each other, and under secure aggregation.
    """
    if len(replies) < _ENOUGH or len({id(reply.tensors) for reply in replies.values()}) == 1:
        return {}
    counts = {name: count for name, count in _counts_of_weights(server).items() if name.startswith(network)}
    sent = {k: Message({n: reply.tensors[n] for n in counts if n in reply.tensors}) for k, reply in replies.items()}
    return {k: _typical(_sizes(weights, server), counts) for k, weights in sent.items()}


def shortened(
    server: Message, replies: Mapping[int, Message], images: Mapping[int, float]
) -> tuple[dict[int, Message], dict[int, str]]:
    """Return the answers, where a network's change is at most twice the usual one or as long, and whose was longer.

    The usual one is the median, for a client with more images times that factor. A target network follows the online
    one, by more with each step: its change grows with the square.
    """
    left, reasons = dict(replies), {}
    for network, power in (("online.", 1), ("target.", 2)):
        changes, factors = weight_changes(server, replies, network), _factors(replies, images)
        usual = median_low(changes.values()) if changes else 0.0
        for k, change in changes.items():
            if change > _MOST_OF_WHOLE * (most := usual * factors[k] ** power) > 0:
                old, new, own = server.tensors, left[k].tensors, _counts_of_weights(server).keys() & left[k].tensors
                nearer = {n: torch.lerp(old[n], new[n], most / change) for n in own if n.startswith(network)}
                left[k] = replace(left[k], tensors=new | nearer)
                times = f"{change / most:.3g} times as much as usual"
                reasons[k] = f"its {network}* weights have changed {times}: they count as changed by the usual"
    return left, reasons


def _factors(replies: Mapping[int, Message], images: Mapping[int, float]) -> dict[int, float]:
    usual = median_low(images[k] for k in replies) if replies else 0.0
    return {k: max(1.0, images[k] / usual) for k in replies}


def compared_sizes(
    server: Message, replies: Mapping[int, Message], factors: Mapping[int, float], alone: bool
) -> Iterator[_Comparison]:
    """Yield the sizes of each floating-point tensor, and how many times smaller all weights together have become.

    `alone` says that there is one answer, whose median tells nothing: only weights are compared, with the server's.
    Where it is a single client's, and no mean of several, they may be 1000 times as large, and up to 1000: one client
    may change much.
    """
    single = len(replies) == 1
    multiple = _MOST_OF_OTHER if single else _MOST_OF_WEIGHT
    own = _sizes(server)
    # what only one client sends, as `dictionary.3`, is compared with what the others send, as `dictionary`
    answers = {
        k: {name.removesuffix(f".{k}"): size for name, size in _sizes(reply).items()} for k, reply in replies.items()
    }
    counts = _counts_of_weights(server)
    typical = _typical(own, counts)
    for name in dict.fromkeys(name for answer in answers.values() for name in answer):
        if name not in counts and (alone or (name not in own and len(answers) < _ENOUGH)):
            continue
        for i, measure in enumerate(_MEASURES):
            holders = {k: answer[name][i] for k, answer in answers.items() if name in answer}
            before, usual = own.get(name, (0.0, 0.0))[i], 0.0 if alone else median_low(holders.values())
            most = _MOST_OF_OTHER * usual
            if before:
                most = (multiple if name in counts else _MOST_OF_OTHER) * max(before, usual)
            if name in counts:  # a scale or a bias of few entries may pass through zero
                most = max(most, multiple * typical, 1000.0 if single else 0.0)
            for k, size in holders.items():
                yield (k, f"{name} holds, {measure},", size, most * factors[k])
    for k, answer in answers.items():
        sent = {name: own[name] for name in answer if name in counts}
        before, after = _typical(sent, counts), _typical(answer, counts)
        times = before / after if after else math.inf if before else 1.0
        yield (k, "its weights have become smaller by a factor of", times, multiple)


def compared_changes(
    server: Message, replies: Mapping[int, Message], factors: Mapping[int, float]
) -> Iterator[_Comparison]:
    """Yield the change of all weights together, and the sizes of the change of each tensor, counters too."""
    answers, counts = {k: _sizes(reply, server) for k, reply in replies.items()}, _counts_of_weights(server)
    typical = {k: _typical(answer, counts) for k, answer in answers.items()}
    usual_weight = median_low(typical.values())
    for k, change in typical.items():
        most = _MOST_OF_UPDATE * factors[k] * usual_weight
        yield (k, "its weights have changed, as root mean square of all, by", change, most)
    for name in dict.fromkeys(name for answer in answers.values() for name in answer):
        for i, measure in enumerate(_MEASURES):
            holders = {k: answer[name][i] for k, answer in answers.items() if name in answer}
            usual = max(usual_weight, median_low(holders.values()))
            for k, change in holders.items():
                most = (_MOST_OF_WEIGHT if name in counts else _MOST_OF_OTHER) * factors[k] * usual
                yield (k, f"{name} has changed, {measure}, by", change, most)


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


def _counts_of_weights(server: Message) -> dict[str, int]:
    weights = {name: tensor for name, tensor in server.tensors.items() if name.startswith(("online.", "target."))}
    return {name: tensor.numel() for name, tensor in weights.items() if not is_statistic(name, tensor)}


def _typical(sizes: _Sizes, counts: Mapping[str, int]) -> float:
    """Return the root mean square over the entries of all weights among these tensors; 0 if there are none."""
    entries = sum(counts.get(name, 0) for name in sizes)
    return math.sqrt(sum(counts.get(name, 0) * size[0] ** 2 for name, size in sizes.items()) / max(entries, 1))


def _sizes(message: Message, before: Message | None = None) -> _Sizes:
    """Return the sizes of the floating-point tensors; with `before` of the changes of all tensors since then."""
    tensors = message.tensors.items()
    if before is None:
        return {name: _size(tensor) for name, tensor in tensors if tensor.is_floating_point()}
    both = [(name, tensor, before.tensors[name]) for name, tensor in tensors if name in before.tensors]
    # the difference of two integers may not fit their dtype
    pairs = [(name, new if new.is_floating_point() else new.double(), old) for name, new, old in both]
    return {name: _size(new - old) for name, new, old in pairs if new.shape == old.shape}


def _size(tensor: Tensor) -> tuple[float, float]:
    if tensor.numel() == 0:
        return 0.0, 0.0
    values = tensor.detach()
    low, high = values.aminmax()
    length = torch.linalg.vector_norm(values, dtype=torch.float64)  # which makes no copy in float64
    return float(length) / math.sqrt(tensor.numel()), max(-float(low), float(high))
