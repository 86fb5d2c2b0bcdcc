"""What leaves a client where Flower's differential privacy or SecAgg+ is switched on.

Of a client's numbers and metrics only those stay that its images do not change, so not its losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage

from ...engine_options import FlowerOptions
from .differential_privacy import clipped_reply
from .secure_aggregation import masked_answer
from .wire import from_records, to_records

_KEPT_METRICS = ("memory", "flops")  # of the first step, whatever its images are


def private_answer(
    options: FlowerOptions, message: FlowerMessage, context: Context, train: Callable[[], RecordDict]
) -> RecordDict:
    """A client's answer to a round's message, with what `options` switch on.

    Args:
        options: the site's own copy of the recipe's; what the server asks for changes nothing.
        message, context: as Flower gives them to a ClientApp.
        train: makes the answer that would leave without; with secure aggregation only called in the stage that it is
            needed in.

    Raises:
        UserError: of `train`; weights that are not finite or, with secure aggregation, beyond its clipping_range.
    """
    if options.secure_aggregation is None and options.differential_privacy is None:
        return train()

    def answer() -> RecordDict:
        records = train()
        reply = from_records(records)
        if options.differential_privacy is not None:
            reply = clipped_reply(options.differential_privacy, message, context, reply)
        metrics = {name: value for name, value in reply.metrics.items() if name in _KEPT_METRICS}
        kept = dataclasses.replace(reply, numbers={"samples": reply.numbers["samples"]}, metrics=metrics)
        return RecordDict({**to_records(kept), "answer": records["answer"]})

    if options.secure_aggregation is None:
        return answer()
    return masked_answer(options.secure_aggregation, message, context, answer)
