"""The server's guard: an answer that cannot be right is refused, named, and left out of its round.

It runs in `Method.aggregate`, before every aggregator and under every engine. It finds broken answers, and those that
are far larger than the others (outliers.py); plausible but wrong numbers pass. In doubt it accepts: leaving out an
honest client is the greater harm. The images by which a client counts are limited too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import Field

from .aggregators.base import OWN_IMAGES, Shape
from .errors import UserError
from .evaluation.metrics import is_reserved
from .messages import Message
from .options import Options
from .outliers import outliers

#: why a client's answer was left out of the last round: `refused/3` in the config of the server's state
REFUSED = "refused/"
#: why a client counts by fewer images in the last round than it states: `capped/3` in the config
CAPPED = "capped/"
TOLD_CAPPED = "capped: "  # how the reason begins in refused.csv
_LARGEST = 1e6  # magnitude in a tensor; networks stay far below
_MOST_NUMBERS = 1000  # each is a line of metrics.csv in every round
_LONGEST_NAME = 200  # characters in the name of a number or metric
_NEVER_NEGATIVE = (".running_var", ".num_batches_tracked")  # a square root is taken of the first; the second counts
_MOST_GROWTH = 2  # of a client's number of images during a run: a site may collect more, and counts by them


class GuardOptions(Options):
    """When an answer is refused, and when a round fails because too few answers are left."""

    minimum_answers: int = Field(1, ge=1, description="usable answers that a round needs; with fewer the run stops")
    largest_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="of all images that one client counts by; by default 1/2 + 1/clients, at most 0.9; 1 for the "
        "partitions quantity_skew and column, which are uneven on purpose",
    )
    largest_influence: float | None = Field(
        None,
        gt=0,
        le=1,
        description="of a round's change of the weights that one client has (its images times its own change), and of "
        "the mean kernel; beyond that it counts by less. Below 1 running statistics are the clients' median, and a "
        "change of twice the usual counts as a usual one. By default 1/2 for sites, whose images nobody else counts, "
        "else 1",
    )


@dataclass(frozen=True)
class Asked:
    """The answers that a round expects.

    Attributes:
        expected: by client the tensors that it must send (see `Aggregator.expected`).
        complete: whether any other tensor is refused.
        sizes: the sizes that shapes give by name; a name that is not among them may have any size.
        samples: the images of each client; it may report up to twice as many. A client that is not among them may
            report any positive number.
        noisy: whether a variance or a counter may be negative, because noise was added to it.
        largest_share: of all images that a client counts by, see `GuardOptions.largest_share`.
        rate: the round's learning rate.
    """

    expected: dict[int, dict[str, Shape]]
    complete: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[int, int] = field(default_factory=dict)
    noisy: bool = False
    largest_share: float | None = None
    rate: float = 1.0


def refusals(server: Message, replies: dict[int, Message], asked: Asked) -> dict[int, str]:
    """Return why each broken answer is refused, by client; empty if all answers are valid.

    An answer is refused if a tensor is missing, was not asked for, has a wrong shape or dtype, or contains NaN, an
    infinity or a magnitude above a million; or if a variance or a counter is negative. It is also refused if `samples`
    is missing, not positive or more than twice the client's number of images, if a number or metric is not finite, or
    if a metric has a name that only the server may use. The reason names the first fault. The answers that are left are
    compared with each other, see `outliers`.

    An answer's tensor has the dtype of the server's entry of the same name, and is float32 where it was asked for and
    there is none.
    """
    capped = capped_images(asked.samples, asked.largest_share)
    reasons = {}
    for k in sorted(replies):
        images = asked.samples.get(k)
        own_images = None if images is None else range(1, int(_MOST_GROWTH * capped.get(k, images)) + 1)
        reason = (
            _fault_of_shapes(replies[k], asked.expected[k], {**asked.sizes, OWN_IMAGES: own_images})
            or _fault_of_tensors(server, k, replies[k], asked)
            or _fault_of_numbers(replies[k], images)
        )
        if reason:
            reasons[k] = reason[:500]  # it may contain a name that the client chose
    valid = {k: reply for k, reply in replies.items() if k not in reasons}
    counts = {k: reply.numbers["samples"] for k, reply in valid.items()}
    counts |= capped_images({**asked.samples, **counts}, asked.largest_share)  # also of clients that have stated none
    return dict(sorted((reasons | outliers(server, valid, counts, asked.rate)).items()))


def capped_images(images: Mapping[int, float], share: float | None) -> dict[int, float]:
    """Return by how many images those clients count that state more than a share of all; empty if none does.

    Each of them then has exactly `share` of all images, as far as that is possible: with 1 / clients and less all count
    alike. See `GuardOptions.largest_share` for its default.
    """
    if len(images) < 2:
        return {}
    if share is None:
        share = min(0.9, 0.5 + 1 / len(images))
    descending = sorted(images.values(), reverse=True)
    most = descending[-1]
    for capped, largest in enumerate(descending):
        left = 1 - capped * share  # of the whole, for those that are not capped
        if left > 0 and largest <= (bound := share * sum(descending[capped:]) / left):
            most = bound
            break
    return {k: most for k, count in images.items() if count > most}


def reasons_in(server: Message, kind: str) -> dict[int, str]:
    """Return why clients were `REFUSED` or `CAPPED` in the round that made this state of the server, by client."""
    return {int(key.removeprefix(kind)): str(why) for key, why in server.config.items() if key.startswith(kind)}


def require_answers(refused: dict[int, str], answers: int, round_number: int, options: GuardOptions) -> None:
    """Raise UserError if too few of a round's answers are left, with the reason of each that was refused."""
    left = answers - len(refused)
    if left < options.minimum_answers:
        what = f"round {round_number}: {left} of {answers} answers are valid, but guard.minimum_answers is"
        reasons = "".join(f"; client {k}: {reason}" for k, reason in refused.items())
        raise UserError(f"{what} {options.minimum_answers}{reasons}")


def _fault_of_shapes(reply: Message, expected: dict[str, Shape], sizes: Mapping[str, int | range | None]) -> str | None:
    for name, shape in expected.items():
        if name not in reply.tensors:
            return f"{name} is missing"
        wanted = [sizes.get(size) if isinstance(size, str) else size for size in shape]
        got = list(reply.tensors[name].shape)
        if len(got) != len(wanted) or not all(map(_fits, got, wanted)):
            return f"{name} has shape {got}, expected [{', '.join(map(_size_text, wanted))}]"
    return None


def _fits(size: int, wanted: int | range | None) -> bool:
    return wanted is None or (size in wanted if isinstance(wanted, range) else size == wanted)


def _size_text(wanted: int | range | None) -> str:
    if isinstance(wanted, range):
        return f"{wanted.start} to {wanted.stop - 1}"
    return "any" if wanted is None else str(wanted)


def _fault_of_tensors(server: Message, k: int, reply: Message, asked: Asked) -> str | None:
    for name, tensor in reply.tensors.items():
        if asked.complete and name not in asked.expected[k]:
            return f"{name} was not asked for"
        known = server.tensors.get(name)
        wanted = torch.float32 if known is None else known.dtype
        if tensor.dtype != wanted and (known is not None or name in asked.expected[k]):
            return f"{name} has dtype {tensor.dtype}, expected {wanted}"
        if tensor.is_complex():
            return f"{name} has dtype {tensor.dtype}, expected real numbers"
        low, high = map(float, tensor.detach().aminmax()) if tensor.numel() else (0.0, 0.0)
        if math.isnan(low):  # and so is `high`
            return f"{name} holds NaN"
        if math.isinf(low) or math.isinf(high):
            return f"{name} holds an infinite value"
        magnitude = max(-low, high)
        most = _LARGEST if tensor.is_floating_point() else 2.0**53  # a mean in float64 holds larger integers inexactly
        if magnitude > most:
            return f"{name} holds {magnitude:.3g} in magnitude, more than {most:.3g}"
        if low < 0 and name.endswith(_NEVER_NEGATIVE) and not asked.noisy:
            return f"{name} holds {low:.3g}, expected no negative value"
    return None


def _fault_of_numbers(reply: Message, images: int | None) -> str | None:
    samples = reply.numbers.get("samples", 0)
    if not samples > 0:
        return f"samples is {reply.numbers.get('samples', 'missing')}, expected a positive number"
    if images is not None and samples > _MOST_GROWTH * images:
        return f"samples is {samples:g}, more than twice {images}, the client's number of images when the run began"
    if (count := len(reply.numbers) + len(reply.metrics)) > _MOST_NUMBERS:
        return f"it has {count} numbers and metrics, more than {_MOST_NUMBERS}"
    for name in reply.metrics:
        if is_reserved(name):
            return f"the metric {name} has a name that only the server may use"
    # A metric may be as large as the operations of a round, and the mean over the clients must be a number.
    for kind, values, most in (("number", reply.numbers, 1e12), ("metric", reply.metrics, 1e30)):
        for name, value in values.items():
            if not name.isascii() or len(name) > _LONGEST_NAME:  # other characters may look like these
                return f"the name of a {kind} is {name[:50]!a}, expected at most {_LONGEST_NAME} ASCII characters"
            if not abs(value) <= most:  # NaN compares false
                return f"the {kind} {name} is {value}"
    return None
