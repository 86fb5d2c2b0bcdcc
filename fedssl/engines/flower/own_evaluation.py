"""A client's evaluation of its own model, within its answer: numbers and a tensor beside those of the round."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from ...guard import is_measure
from ...messages import Message

_MEASURE = "evaluation/"
_SPECTRUM = "evaluation.spectrum"


@dataclasses.dataclass
class OwnEvaluation:
    """What a client says of its own model; not checked yet.

    Attributes:
        measures: by name, such as knn.
        spectrum: the singular values of the test representations [n]; None where there are none.
    """

    measures: dict[str, float]
    spectrum: Tensor | None


def add_evaluation(reply: Message, measures: dict[str, float], spectrum: Tensor) -> None:
    """Put an evaluation into a client's answer."""
    reply.numbers.update({_MEASURE + name: value for name, value in measures.items()})
    reply.tensors[_SPECTRUM] = spectrum


def split_evaluation(reply: Message) -> tuple[Message, OwnEvaluation]:
    """A client's answer to the round, and its evaluation."""
    measures = {name: value for name, value in reply.numbers.items() if name.startswith(_MEASURE)}
    numbers = {name: value for name, value in reply.numbers.items() if name not in measures}
    tensors = dict(reply.tensors)
    spectrum = tensors.pop(_SPECTRUM, None)
    evaluation = OwnEvaluation({name.removeprefix(_MEASURE): v for name, v in measures.items()}, spectrum)
    return dataclasses.replace(reply, tensors=tensors, numbers=numbers), evaluation


def evaluation_fault(evaluation: OwnEvaluation) -> str | None:
    """Why an evaluation cannot be used; None where it can."""
    spectrum = evaluation.spectrum
    if spectrum is None or spectrum.dim() != 1 or not spectrum.is_floating_point() or not spectrum.isfinite().all():
        return "its evaluation has no valid spectrum: expected one dimension of finite floating-point numbers"
    for name, value in evaluation.measures.items():
        if not is_measure(name):
            return f"its evaluation holds {name[:100]!r}, which is not a measure of a model"
        if not math.isfinite(value):
            return f"its evaluation has an invalid {name}: expected a finite number, got {value}"
    return None
