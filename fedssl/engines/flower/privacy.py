"""Flower's differential privacy and SecAgg+ around our messages; clipping, noise and cryptography are Flower's own.

Flower's mods take one record of NumPy arrays there and back. They get a client's weights as one flat float64 array:
every entry that travels and is floating point, running statistics too. (As an array of its own a zero-dimensional
entry, such as a learnt temperature, would pass Flower's clipping and noise unchanged.) Integer entries, such as
BatchNorm's counter of batches, come back as they were sent: they tell how many images a client has. Of a client's
numbers only those stay that its images do not change, so not its losses.

With differential privacy every client counts the same: the noise is scaled for that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    bytes_to_ndarray,
    ndarray_to_bytes,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, add_gaussian_noise_inplace, compute_stdv
from numpy.typing import NDArray
from torch import Tensor

from ...engine_options import FixedClipping, FlowerOptions, LocalDP, SecAggPlus
from ...errors import UserError
from ...federation import Federation
from ...guard import refused_in
from ...messages import Message
from ...method import Method
from .wire import from_records, to_records

_MASKED = "masked"
_KEPT_METRICS = ("memory", "flops")  # of the first step, whatever its images are

Vector = NDArray[np.float64]

# Weights as one vector


def flatten(tensors: dict[str, Tensor]) -> Vector:
    """All floating-point tensors one after another, in the order of their names, float64 [n]."""
    names = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point())
    flat: Vector = torch.cat([tensors[name].detach().double().flatten() for name in names]).numpy()
    return flat


def unflatten(vector: Vector, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """`like` with its floating-point tensors taken from a vector of `flatten`, in their own dtypes."""
    sizes = {name: like[name].numel() for name in sorted(like) if like[name].is_floating_point()}
    parts = dict(zip(sizes, torch.from_numpy(vector).split(list(sizes.values())), strict=True))
    return {
        name: parts[name].reshape(tensor.shape).to(tensor.dtype) if name in parts else tensor
        for name, tensor in like.items()
    }


@contextmanager
def _unpredictable() -> Iterator[None]:
    """Run the body with NumPy's global generator, which Flower draws from, seeded by the operating system.

    Not from the run's seed, which everybody knows. And not as it stands: a node's process is a fork of one that has
    imported NumPy (flower_nodes.py), so that every round would draw the same noise.
    """
    before = np.random.get_state()  # noqa: NPY002 - it is what Flower uses
    np.random.seed(np.frombuffer(os.urandom(4 * 624), dtype=np.uint32))  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


# The client's side


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

    def answer() -> RecordDict:
        records = train()
        reply = from_records(records)
        if options.differential_privacy is not None:
            reply = _clipped(options.differential_privacy, message, context, reply)
        metrics = {name: value for name, value in reply.metrics.items() if name in _KEPT_METRICS}
        changed = to_records(dataclasses.replace(reply, numbers={"samples": reply.numbers["samples"]}, metrics=metrics))
        changed["answer"] = records["answer"]
        return changed

    if options.secure_aggregation is None:
        return train() if options.differential_privacy is None else answer()
    return _masked(options.secure_aggregation, message, context, answer)


def _clipped(privacy: LocalDP | FixedClipping, message: FlowerMessage, context: Context, reply: Message) -> Message:
    """The reply after Flower's mod; it counts as one sample."""
    received = from_records(message.content).tensors
    unknown = [name for name in reply.tensors if name not in received]
    if unknown:
        raise UserError(f"flower.differential_privacy clips updates, and {unknown[0]} came with no message")
    before = {name: received[name] for name in reply.tensors}
    old, new = flatten(before), flatten(reply.tensors)
    _require_finite(new)
    if np.array_equal(old, new):
        new[0] += 1e-12 * max(1.0, abs(new[0]))  # Flower divides by the update's length
    if isinstance(privacy, LocalDP):
        sensitivity = 2 * privacy.clipping_norm if privacy.sensitivity is None else privacy.sensitivity
        mod: Any = LocalDpMod(privacy.clipping_norm, sensitivity, privacy.epsilon, privacy.delta)
    else:
        mod = fixedclipping_mod
    config = ConfigRecord({KEY_CLIPPING_NORM: privacy.clipping_norm})

    def call_next(inner: FlowerMessage, context: Context) -> FlowerMessage:
        return FlowerMessage(RecordDict({"weights": ArrayRecord({"weights": Array(new)})}), reply_to=inner)

    sent = RecordDict({"weights": ArrayRecord({"weights": Array(old)}), "config": config})
    with _unpredictable():
        out = mod(FlowerMessage(sent, reply_to=message), context, call_next)
    if out.has_error():
        raise UserError(f"flower.differential_privacy: {out.error.reason}")
    tensors = unflatten(out.content["weights"]["weights"].numpy(), before)
    return dataclasses.replace(reply, tensors=tensors, numbers=reply.numbers | {"samples": 1})


def _masked(
    options: SecAggPlus, message: FlowerMessage, context: Context, answer: Callable[[], RecordDict]
) -> RecordDict:
    """A client's part in one of the protocol's stages; the masked weights leave as one int32 tensor."""
    task: Any = message.content["task"]
    metrics: dict[str, float] = {}

    def call_next(inner: FlowerMessage, context: Context) -> FlowerMessage:
        reply = from_records(answer())
        vector = flatten(reply.tensors)
        _require_finite(vector)
        for name, tensor in reply.tensors.items():  # Flower would cut it off
            if tensor.is_floating_point() and bool((tensor.abs() > options.clipping_range).any()):
                raise UserError(
                    f"{name} is beyond flower.secure_aggregation.clipping_range {options.clipping_range:g}: raise it"
                )
        samples = int(reply.numbers["samples"])
        metrics.update(reply.metrics)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), samples, {})
        return FlowerMessage(fitres_to_recorddict(result, True), reply_to=inner)

    with _unpredictable():
        out = secaggplus_mod(message, context, call_next)
    configs: Any = out.content[RECORD_KEY_CONFIGS]  # the rest of it holds the number of samples
    if Key.MASKED_PARAMETERS in configs:
        # integers below 2^32 as Flower has them in int64; as a tensor they are sent in pieces
        arrays = [bytes_to_ndarray(data) for data in configs[Key.MASKED_PARAMETERS]]
        integers = np.concatenate(arrays).astype(np.uint32).view(np.int32)
        records = to_records(Message({_MASKED: torch.from_numpy(integers)}, metrics=metrics))
    else:
        records = RecordDict({RECORD_KEY_CONFIGS: configs})
    records["answer"] = ConfigRecord({"client": task["client"], "round": task["round"]})
    return records


def _require_finite(vector: Vector) -> None:
    # clipping would let the finite entries pass as they are, and masks would hide it from the server's guard
    if not np.isfinite(vector).all():
        raise UserError("its weights are not finite after training")


# The server's side: differential privacy


@dataclass(frozen=True)
class PrivateMethod(Method):
    """A method whose server adds the noise of `fixed_clipping` to the clients' mean."""

    privacy: LocalDP | FixedClipping | None = None

    def aggregate(self, server: Message, replies: dict[int, Message], round_number: int) -> Message:
        state = super().aggregate(server, replies, round_number)
        accepted = [reply for k, reply in replies.items() if k not in refused_in(state)]
        if not accepted:
            return state
        changed = {name: state.tensors[name] for name in accepted[0].tensors}
        vector = flatten(changed)
        if isinstance(self.privacy, FixedClipping):
            deviation = compute_stdv(self.privacy.noise_multiplier, self.privacy.clipping_norm, len(accepted))
            with _unpredictable():
                add_gaussian_noise_inplace([vector], deviation)
        state.tensors.update(unflatten(vector, changed))
        for name in changed:
            if name.endswith(".running_var"):
                state.tensors[name] = state.tensors[name].clamp(min=0)  # noise may have made a variance negative
        return state


def private_federation(federation: Federation) -> Federation:
    """A federation whose method adds what differential privacy adds on the server."""
    privacy = federation.recipe.flower.differential_privacy
    if privacy is None:
        return federation
    return dataclasses.replace(federation, method=PrivateMethod(**vars(federation.method), privacy=privacy))


# The server's side: secure aggregation

#: sends a message to each of the clients; their answers, and why the others gave none
Ask = Callable[[dict[int, RecordDict]], tuple[dict[int, RecordDict], dict[int, str]]]


@dataclass
class SecureMean:
    """What SecAgg+ gave.

    Attributes:
        mean: float64 [n], by the clients' numbers of samples; None where it failed.
        metrics: of each client in the mean, by client.
        missing: why the others are not in it, by client.
    """

    mean: Vector | None = None
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)


def secure_mean(
    options: FlowerOptions, contents: dict[int, RecordDict], nodes: dict[int, int], size: int, number: int, ask: Ask
) -> SecureMean:
    """The mean of the clients' weights by the stages of Flower's SecAggPlusWorkflow.

    Args:
        options: with secure aggregation.
        contents: the round's message to each client.
        nodes: each client's node.
        size: how many weights a client sends.
        number: the round.
        ask: see `Ask`.
    """
    result = SecureMean()
    left = set(contents)
    while True:
        exchange = _Exchange({k: contents[k] for k in left}, nodes, size, ask)
        protocol = _Protocol(options, exchange, number)
        agreed = protocol.run("setup_stage") and protocol.run("share_keys_stage")
        result.missing |= exchange.missing
        if not exchange.missing:
            break
        left -= exchange.missing.keys()  # in the later stages Flower asks for the keys of all who began
        if not left:
            return result
    counted: set[int] = set()
    if agreed and protocol.run("collect_masked_vectors_stage"):
        counted = left - exchange.missing.keys()
        result.missing |= exchange.missing
        protocol.run("unmask_stage")
    if protocol.strategy.mean is None:
        why = protocol.failure or "too few clients are left for secure aggregation"
        result.missing = dict.fromkeys(contents, why) | exchange.missing | result.missing
        return result
    result.mean = protocol.strategy.mean
    result.metrics = {k: exchange.metrics[k] for k in sorted(counted)}
    return result


def quantization_range(clients: int) -> int:
    """The largest integer that a client may send: a power of two, with which the clients' sum stays below 2^32."""
    return min(2**30, 1 << ((2**32 - 1) // clients).bit_length() - 1)


class _Protocol:
    """Flower's workflow, which is made for its former strategies, with what it wants of such a one."""

    def __init__(self, options: FlowerOptions, exchange: _Exchange, number: int):
        secure = options.secure_aggregation
        assert secure is not None
        clients = len(exchange.contents)
        shares: int | float = 1.0  # of all clients
        if secure.num_shares is not None and secure.num_shares < clients:
            shares = secure.num_shares
        self._workflow = SecAggPlusWorkflow(
            shares,
            secure.reconstruction_threshold,
            max_weight=float(1 if options.differential_privacy else secure.max_weight),
            clipping_range=secure.clipping_range,
            quantization_range=quantization_range(clients),
        )
        self.strategy = _Strategy([exchange.nodes[k] for k in exchange.contents])
        records = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: number})})
        records[MAIN_PARAMS_RECORD] = ArrayRecord()
        strategy: Any = self.strategy
        self._context = LegacyContext(Context(0, 0, {}, records, {}), strategy=strategy)
        self._state = WorkflowState()
        self._exchange = exchange
        self.failure: str | None = None

    def run(self, stage: str) -> bool:
        try:
            done: bool = getattr(self._workflow, stage)(self._exchange, self._context, self._state)
        except Exception as error:  # a client may send keys or shares that are none
            self.failure = f"secure aggregation failed: {type(error).__name__}: {error}"
            return False
        return done and not (self._exchange.missing and stage in ("setup_stage", "share_keys_stage"))


@dataclass
class _Strategy:
    nodes: list[int]
    mean: Vector | None = None

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        [self.mean] = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class _Exchange:
    """What Flower's workflow takes for its grid; puts the round's message around the one stage that needs it."""

    def __init__(self, contents: dict[int, RecordDict], nodes: dict[int, int], size: int, ask: Ask):
        self.contents, self.nodes, self._size, self._ask = contents, nodes, size, ask
        self.metrics: dict[int, dict[str, float]] = {}
        self.missing: dict[int, str] = {}

    def send_and_receive(self, messages: list[FlowerMessage], *, timeout: float | None = None) -> list[Any]:
        clients = {self.nodes[k]: k for k in self.contents}
        asked, collects = {}, False
        for message in messages:
            k = clients[message.metadata.dst_node_id]
            configs: Any = message.content[RECORD_KEY_CONFIGS]
            collects = configs[Key.STAGE] == Stage.COLLECT_MASKED_VECTORS
            whole = self.contents[k] if collects else {"task": self.contents[k]["task"]}
            asked[k] = RecordDict({**whole, RECORD_KEY_CONFIGS: ConfigRecord(dict(configs))})  # Flower shares one
        came, missing = self._ask(asked)
        answers = []
        for k, content in came.items():
            try:
                answer = self._unpacked(k, content) if collects else content
            except UserError as error:
                missing[k] = str(error)
                continue
            metadata = SimpleNamespace(src_node_id=self.nodes[k])
            answers.append(SimpleNamespace(metadata=metadata, content=answer, has_error=lambda: False))
        self.missing |= missing
        return answers

    def _unpacked(self, client: int, content: RecordDict) -> RecordDict:
        """Masked weights as Flower has them: the weight and the weighted parameters, in int64."""
        message = from_records(content)
        masked = message.tensors.get(_MASKED)
        if masked is None or masked.dtype != torch.int32 or masked.shape != (1 + self._size,):
            raise UserError(f"expected {1 + self._size} masked weights, it sent something else")
        self.metrics[client] = message.metrics
        integers = masked.numpy().view(np.uint32).astype(np.int64)
        result = fitres_to_recorddict(FitRes(Status(Code.OK, ""), Parameters([], ""), 0, {}), True)
        parts = [ndarray_to_bytes(part) for part in (integers[:1], integers[1:])]
        result[RECORD_KEY_CONFIGS] = ConfigRecord({Key.MASKED_PARAMETERS: parts})
        return result
