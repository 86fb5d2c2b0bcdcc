"""The server's guard: an answer that cannot be right is refused, named, and left out of its round.

It runs in `Method.aggregate`, before every aggregator and under every engine. It finds broken answers, not malicious
ones: a client that sends plausible but wrong numbers passes.
"""

from __future__ import annotations

import math
import sys
from collections import Counter

from pydantic import Field
from torch import Tensor

from .aggregators.base import Shape
from .errors import UserError
from .messages import Message
from .options import Options

#: why a client's answer was left out of the last round: `refused/3` in the config of the server's state
REFUSED = "refused/"

#: metrics that an engine writes itself for every client; a client must not send one of these names
ENGINE_METRICS = ("bytes_down", "bytes_up", "missing", "refused", "dropped", "answers")

_MEASURES = ("knn", "linear", "linear_auroc", "effective_rank", "alignment", "uniformity")
_MEASURES_OF_FINE_TUNING = ("semi_supervised_", "fine_tune_")
_MOST_NUMBERS = 1000  # each is a line of metrics.csv in every round
_LONGEST_NAME = 200  # characters in the name of a number or metric
_LONGEST_REASON = 500  # characters; it may contain a name that the client chose
_LARGEST_NUMBER = 1e12  # of samples and the like
_LARGEST_INTEGER = 2**53  # what a mean in float64 holds exactly


def is_measure(name: str) -> bool:
    """Whether a metric is one that `evaluate_model` gives."""
    return name in _MEASURES or name.startswith(_MEASURES_OF_FINE_TUNING)


class GuardOptions(Options):
    """When an answer is refused, and when a round fails because too few answers are left."""

    minimum_answers: int = Field(1, ge=1, description="usable answers that a round needs; with fewer the run stops")
    largest_value: float = Field(
        1e6, gt=0, description="largest magnitude in a tensor of an answer; networks stay far below"
    )


def refusals(
    server: Message, replies: dict[int, Message], expected: dict[int, dict[str, Shape]], complete: bool, largest: float
) -> dict[int, str]:
    """Why each broken answer is refused, by client; empty if all answers are valid.

    An answer is refused if a tensor is missing, was not asked for, has a wrong shape or dtype, or contains NaN, an
    infinity or a magnitude above `largest`. It is also refused if `samples` is missing or not positive, if a number or
    metric is not finite, or if a metric has a name that an engine or the evaluation uses. The reason names the first
    fault.

    Args:
        server: the server's state; an answer's tensor has the dtype of its entry of the same name.
        replies: the answers by client.
        expected: the tensors that each client must send (see `Aggregator.expected`). A size given by name is the
            size that most answers have; among equally frequent sizes, that of the lowest client number.
        complete: whether any other tensor is refused.
        largest: `GuardOptions.largest_value`.
    """
    shared = _shared_sizes(replies, expected)
    reasons = {}
    for k in sorted(replies):
        reason = _fault(server, replies[k], expected[k], complete, largest, shared)
        if reason:
            reasons[k] = reason[:_LONGEST_REASON]
    return reasons


def refused_in(server: Message) -> dict[int, str]:
    """Why answers were left out of the round that made this state of the server, by client."""
    reasons = {name: str(value) for name, value in server.config.items() if name.startswith(REFUSED)}
    return {int(name.removeprefix(REFUSED)): reason for name, reason in reasons.items()}


def require_answers(refused: dict[int, str], answers: int, round_number: int, options: GuardOptions) -> None:
    """Raise UserError if too few of a round's answers are left; it says why each of the others was refused."""
    left = answers - len(refused)
    if left >= options.minimum_answers:
        return
    reasons = "".join(f"; client {k}: {reason}" for k, reason in refused.items())
    raise UserError(
        f"round {round_number}: {left} of {answers} answers are valid, but guard.minimum_answers is "
        f"{options.minimum_answers}{reasons}"
    )


def _shared_sizes(replies: dict[int, Message], expected: dict[int, dict[str, Shape]]) -> dict[str, int]:
    seen: dict[str, Counter[int]] = {}
    for k in sorted(replies):
        for name, shape in expected[k].items():
            tensor = replies[k].tensors.get(name)
            if not isinstance(tensor, Tensor) or tensor.dim() != len(shape):
                continue
            for wanted, size in zip(shape, tensor.shape, strict=True):
                if isinstance(wanted, str):
                    seen.setdefault(wanted, Counter())[size] += 1
    return {label: sizes.most_common(1)[0][0] for label, sizes in seen.items()}


def _fault(
    server: Message,
    reply: Message,
    expected: dict[str, Shape],
    complete: bool,
    largest: float,
    shared: dict[str, int],
) -> str | None:
    for name, shape in expected.items():
        if name not in reply.tensors:
            return f"{name} is missing"
        wanted = [shared.get(size) if isinstance(size, str) else size for size in shape]
        got = list(reply.tensors[name].shape)
        if len(got) != len(wanted) or any(w not in (None, g) for w, g in zip(wanted, got, strict=True)):
            return f"{name} has shape {got}, expected {['any' if w is None else w for w in wanted]}"
    for name, tensor in reply.tensors.items():
        if complete and name not in expected:
            return f"{name} was not asked for"
        reason = _fault_of_tensor(tensor, server.tensors.get(name), largest)
        if reason:
            return f"{name} {reason}"
    if not reply.numbers.get("samples", 0) > 0:
        return f"samples is {reply.numbers.get('samples', 'missing')}, expected a positive number"
    if len(reply.numbers) + len(reply.metrics) > _MOST_NUMBERS:
        return f"it has {len(reply.numbers) + len(reply.metrics)} numbers and metrics, more than {_MOST_NUMBERS}"
    for name in reply.metrics:
        if name in ENGINE_METRICS or is_measure(name):
            return f"the metric {name} has a name that only the server may use"
    # A metric may be as large as the operations of a round.
    for kind, values, largest_number in (
        ("number", reply.numbers, _LARGEST_NUMBER),
        ("metric", reply.metrics, sys.float_info.max),
    ):
        for name, value in values.items():
            if len(name) > _LONGEST_NAME:
                return f"the name of a {kind} has {len(name)} characters, more than {_LONGEST_NAME}"
            if not abs(value) <= largest_number:  # NaN compares false
                return f"the {kind} {name} is {value}"
    return None


def _fault_of_tensor(tensor: Tensor, known: Tensor | None, largest: float) -> str | None:
    if known is not None and tensor.dtype != known.dtype:
        return f"has dtype {tensor.dtype}, expected {known.dtype}"
    if tensor.is_complex():
        return f"has dtype {tensor.dtype}, expected real numbers"
    if tensor.numel() == 0:
        return None
    low, high = (float(value) for value in tensor.detach().aminmax())
    if math.isnan(low) or math.isnan(high):
        return "holds NaN"
    if math.isinf(low) or math.isinf(high):
        return "holds an infinite value"
    limit = largest if tensor.is_floating_point() else _LARGEST_INTEGER
    if max(-low, high) > limit:
        return f"holds {max(-low, high):.3g} in magnitude, more than {limit:.3g}"
    return None
