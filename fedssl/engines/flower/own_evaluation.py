"""A client's evaluation of its own model, within its answer: numbers and a tensor beside those of the round."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ...guard import is_measure
from ...messages import Message

_MEASURE = "evaluation/"
_SPECTRUM = "evaluation.spectrum"
_LONGEST_SPECTRUM = 2**16  # singular values: at most one for each feature of an encoder
_MOST_MEASURES = 100  # each is a line of metrics.csv
_LONGEST_NAME = 100  # characters in the name of a measure


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
    if spectrum is None or spectrum.dim() != 1 or not spectrum.is_floating_point():
        return "its evaluation has no valid spectrum: expected one dimension of floating-point numbers"
    if len(spectrum) > _LONGEST_SPECTRUM:
        return f"its evaluation's spectrum has {len(spectrum)} values, more than {_LONGEST_SPECTRUM}"
    if not ((spectrum >= 0) & spectrum.isfinite()).all():
        return "its evaluation's spectrum is invalid: expected finite values that are not negative"
    if len(evaluation.measures) > _MOST_MEASURES:
        return f"its evaluation has {len(evaluation.measures)} measures, more than {_MOST_MEASURES}"
    for name, value in evaluation.measures.items():
        if not is_measure(name) or len(name) > _LONGEST_NAME:
            return f"its evaluation holds {name[:100]!r}, which is not a measure of a model"
        least, most = _bounds(name, len(spectrum))
        if not least <= value <= most:  # NaN compares false
            return f"its evaluation has an invalid {name}: expected {least:g} to {most:g}, got {value}"
    return None


def _bounds(measure: str, spectrum: int) -> tuple[float, float]:
    """The smallest and largest value of a measure; a little more than what rounding may add."""
    if measure.endswith("effective_rank"):
        return 0.0, (spectrum if measure == "effective_rank" else _LONGEST_SPECTRUM) + 1.0
    if measure == "alignment":  # a squared distance of unit vectors
        return 0.0, 4.01
    if measure == "uniformity":  # the logarithm of a mean of exp(-2 squared distance)
        return -8.01, 0.01
    return 0.0, 100.0
