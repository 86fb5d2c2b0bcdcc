"""Protect a client's answer by Flower's differential privacy or SecAgg+, and add the server's noise.

Under either, a client drops every number and metric that depends on its images, such as its losses.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.differential_privacy import add_gaussian_noise_inplace, compute_clip_model_update, compute_stdv
from torch import Tensor

from ...aggregators.weighted_mean import DISTANCE
from ...errors import SendableError
from ...federation import Federation
from ...guard import REFUSED, reasons_in
from ...messages import Message
from ...method import Method
from ...recipe.recipe import FixedClipping, FlowerOptions, LocalDP
from .secure_aggregation import masked_answer, numpy_seeded_by_system, quantization_range
from .wire import flatten_weights, from_records, require_finite, to_records, unflatten_mean, unflatten_weights


def private_answer(
    options: FlowerOptions, message: FlowerMessage, context: Context, train: Callable[[], RecordDict]
) -> RecordDict:
    """Return a client's answer to a round's message, protected as `options` say, which ask for one or both.

    `options` are the site's own; nothing that the server asks for changes them. `train` returns the answer without
    protection; with secure aggregation it is called only in the stage that needs it.

    Raises:
        UserError: raised by `train`; weights are not finite or, with secure aggregation, beyond its clipping_range;
            with differential privacy, the answer has a tensor that was not received.
    """

    def answer() -> RecordDict:
        reply = from_records(train())
        if options.differential_privacy is not None:
            reply = _clipped_reply(options.differential_privacy, from_records(message.content).tensors, reply)
        # memory and flops are those of the first step, which do not depend on its images
        metrics = {name: value for name, value in reply.metrics.items() if name in ("memory", "flops")}
        kept = dataclasses.replace(reply, numbers={"samples": reply.numbers["samples"]}, metrics=metrics)
        return to_records(kept)

    if options.secure_aggregation is None:
        return answer()
    return masked_answer(options.secure_aggregation, message, context, answer)


def _clipped_reply(privacy: LocalDP | FixedClipping, received: dict[str, Tensor], reply: Message) -> Message:
    """Return a client's reply, clipped by Flower's function and with `local_dp` noised; it counts as one sample.

    Its integer entries, which depend on how many images the client has, are those that it has received.
    """
    for name in reply.tensors:
        if name not in received:
            rule = "flower.differential_privacy clips a tensor's change since it was received"
            raise SendableError(f"{rule}, but {name} was not received from the server")
    before = {name: received[name] for name in reply.tensors}
    old, new = flatten_weights(before), flatten_weights(reply.tensors)
    require_finite(new)
    vectors = [new]
    if not np.array_equal(old, new):  # Flower divides by the update's length
        compute_clip_model_update(vectors, [old], privacy.clipping_norm)
    if isinstance(privacy, LocalDP):
        with numpy_seeded_by_system():
            add_gaussian_noise_inplace(vectors, privacy.noise_deviation)
    tensors = unflatten_weights(vectors[0], before)
    return dataclasses.replace(reply, tensors=tensors, numbers=reply.numbers | {"samples": 1})


@dataclass(frozen=True)
class PrivateMethod(Method):
    """A method whose server refuses answers that are not clipped, and adds the noise of `fixed_clipping` to the mean.

    A client that did not clip has not followed the protocol, so it is left out and not clipped anew: nobody knows what
    else of its answer is wrong. `rounding` is the largest error of an entry under secure aggregation.
    """

    privacy: LocalDP | FixedClipping | None = None
    rounding: float = 0.0

    answers_are_noisy: ClassVar[bool] = True

    def _refusals(self, server: Message, replies: dict[int, Message], *others: Any) -> dict[int, str]:
        refused = super()._refusals(server, replies, *others)
        for k, reply in replies.items():
            if k not in refused and (reason := self._fault(server, reply)):
                refused[k] = reason
        return dict(sorted(refused.items()))

    def _fault(self, server: Message, reply: Message) -> str | None:
        """Return why a client has not protected its answer; None where it may have."""
        if reply.numbers["samples"] != 1:
            count = f"{reply.numbers['samples']:g} images"
            return f"it counts by {count}, but with differential privacy each client counts as one"
        assert self.privacy is not None
        old = flatten_weights({name: server.tensors[name] for name in reply.tensors})
        length, entries = np.linalg.norm(flatten_weights(reply.tensors) - old), len(old) ** 0.5
        # with more noise than that only once in 10^13 answers: a Gaussian's length exceeds its mean by 8 deviations
        noise = self.privacy.noise_deviation * (entries + 8) if isinstance(self.privacy, LocalDP) else 0.0
        most = 1.001 * (self.privacy.clipping_norm + noise) + self.rounding * entries + 1e-6 * np.linalg.norm(old)
        if length > most:
            rule = f"{self.privacy.name} allows {most:.3g} (clipping_norm {self.privacy.clipping_norm:g})"
            return f"its weights have changed by a length of {length:.3g}, but {rule}: it was not clipped"
        return None

    def aggregate(self, server: Message, replies: dict[int, Message], *others: Any, **named: Any) -> Message:
        state = super().aggregate(server, replies, *others, **named)
        state.metrics.pop(DISTANCE, None)  # of clipped or noisy weights
        accepted = [reply for k, reply in replies.items() if k not in reasons_in(state, REFUSED)]
        if not accepted:
            return state
        changed = {name: state.tensors[name] for name in accepted[0].tensors}
        vector = flatten_weights(changed)
        if isinstance(self.privacy, FixedClipping):
            deviation = compute_stdv(self.privacy.noise_multiplier, self.privacy.clipping_norm, len(accepted))
            with numpy_seeded_by_system():
                add_gaussian_noise_inplace([vector], deviation)
        state.tensors.update(unflatten_mean(vector, changed))
        return state


def private_federation(federation: Federation) -> Federation:
    """Return the federation with the server's part of differential privacy, if its recipe switches that on."""
    privacy, secure = federation.recipe.flower.differential_privacy, federation.recipe.flower.secure_aggregation
    if privacy is None:
        return federation
    clients = len(federation.client_rows)
    rounding = 0.0 if secure is None else 2 * clients * secure.clipping_range / quantization_range(clients)
    method = PrivateMethod(**vars(federation.method), privacy=privacy, rounding=rounding)
    return dataclasses.replace(federation, method=method)
