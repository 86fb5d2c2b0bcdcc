"""Carry fedssl's messages by Flower's SecAgg+, under which the server learns the clients' mean alone.

The protocol has four stages: setup, key shares, masked weights, unmasking. `masked_answer` is the client's part in each
and `secure_mean` runs them on the server. The cryptography is Flower's own.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.client.mod import secaggplus_mod
from flwr.common import bytes_to_ndarray, ndarray_to_bytes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.typing import Code, FitIns, FitRes, Parameters, Status
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from ...errors import SendableError, UserError
from ...messages import Message
from ...recipe.recipe import FlowerOptions, SecAggPlus
from .messenger import config_of, one_line
from .wire import Vector, flatten_weights, from_records, require_finite, to_records

_MASKED = "masked"  # the name of a client's masked weights in its answer
Contents = dict[int, RecordDict]  # by client
#: sends each client's records, and is told whether they ask for the client's update; returns the answers by client, and
#: why the other clients gave none
Exchange = Callable[[Contents, bool], tuple[Contents, dict[int, str]]]


@contextmanager
def numpy_seeded_by_system() -> Iterator[None]:
    """Run the body with NumPy's global generator, which Flower draws from, seeded by the operating system.

    Everybody knows the run's seed. The generator cannot stay as it is either: a node's process is a fork of one that
    has imported NumPy (deploy/nodes.py), so every round would draw the same noise.
    """
    before = np.random.get_state()  # noqa: NPY002 - it is what Flower uses
    np.random.seed(np.frombuffer(os.urandom(4 * 624), dtype=np.uint32))  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


def masked_answer(
    options: SecAggPlus, message: FlowerMessage, context: Context, answer: Callable[[], RecordDict]
) -> RecordDict:
    """Return a client's records of a stage; masked weights are an int32 tensor [1 + n], the number of samples first.

    `options` are the site's own. `answer` returns the answer without masks; only the stage that collects it calls it.

    Raises:
        UserError: raised by `answer`; weights are not finite or beyond clipping_range.
    """
    metrics: dict[str, float] = {}

    def call_next(inner: FlowerMessage, context: Context) -> FlowerMessage:
        reply = from_records(answer())
        vector = flatten_weights(reply.tensors)
        require_finite(vector)
        for name, tensor in reply.tensors.items():  # Flower would cut it off
            if tensor.is_floating_point() and bool((tensor.abs() > options.clipping_range).any()):
                option = f"flower.secure_aggregation.clipping_range ({options.clipping_range:g})"
                raise SendableError(f"{name} holds a value beyond {option}: raise that option")
        metrics.update(reply.metrics)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), int(reply.numbers["samples"]), {})
        return FlowerMessage(fitres_to_recorddict(result, True), reply_to=inner)

    with numpy_seeded_by_system():
        masked = secaggplus_mod(message, context, call_next)
    configs: Any = masked.content[RECORD_KEY_CONFIGS]  # the rest of it holds the number of samples
    if Key.MASKED_PARAMETERS in configs:
        # integers below 2^32 as Flower has them in int64; as a tensor they are sent in pieces
        arrays = [bytes_to_ndarray(data) for data in configs[Key.MASKED_PARAMETERS]]
        integers = np.concatenate(arrays).astype(np.uint32).view(np.int32)
        return to_records(Message({_MASKED: torch.from_numpy(integers)}, metrics=metrics))
    return RecordDict({RECORD_KEY_CONFIGS: configs})


def secure_mean(
    options: FlowerOptions, contents: Contents, nodes: dict[int, int], size: int, exchange: Exchange
) -> tuple[Vector | None, dict[int, dict[str, float]], dict[int, str]]:
    """Return the mean of the clients' weights, by the stages of Flower's SecAggPlusWorkflow.

    `contents` has the round's message to each client, who sends `size` weights.

    Returns:
        The mean, float64 [size], weighted by the clients' numbers of samples, or None where the protocol failed; the
        metrics of each client in the mean; and why each other client is not in it, or has answered wrongly afterwards.
    """
    missing: dict[int, str] = {}
    left = dict(contents)
    while left:
        protocol = _Protocol(options, left, nodes, size, exchange)
        agreed = protocol.run("setup_stage") and protocol.run("share_keys_stage")
        if agreed or not protocol.missing:
            break
        missing |= protocol.missing  # in the later stages Flower asks for the keys of all who began
        left = {k: content for k, content in left.items() if k not in missing}
    else:
        return None, {}, missing
    agreed = agreed and protocol.run("collect_masked_vectors_stage")
    late = dict(protocol.missing)  # who is lost in the last stage is in the mean
    if agreed:
        protocol.unmask()
    missing |= late | protocol.wrong
    if protocol.mean is None:
        return None, {}, dict.fromkeys(contents, protocol.failure) | missing
    return protocol.mean, {k: protocol.metrics[k] for k in sorted(left.keys() - late.keys())}, missing


def quantization_range(clients: int) -> int:
    """Return the largest integer that a client may send: a power of two that keeps the clients' sum below 2^32."""
    return min(2**30, 1 << ((2**32 - 1) // clients).bit_length() - 1)


class _Protocol:
    """Flower's SecAggPlusWorkflow for a group of clients, with the grid and the strategy that it calls."""

    def __init__(
        self, options: FlowerOptions, contents: Contents, nodes: dict[int, int], size: int, exchange: Exchange
    ):
        secure = options.secure_aggregation
        assert secure is not None
        shares: int | float = 1.0  # of all clients
        if secure.num_shares is not None and secure.num_shares < len(contents):
            shares = secure.num_shares
        self._workflow = SecAggPlusWorkflow(
            shares,
            secure.reconstruction_threshold,
            max_weight=float(1 if options.differential_privacy else secure.max_weight),
            clipping_range=secure.clipping_range,
            quantization_range=quantization_range(len(contents)),
        )
        self._state = WorkflowState()
        # the round's number and the weights travel in `contents`, not in the workflow's messages
        records = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 0})})
        records[MAIN_PARAMS_RECORD] = ArrayRecord()
        caller: Any = self  # has what the workflow calls of a grid and of a strategy
        self._caller, self._context = caller, LegacyContext(Context(0, 0, {}, records, {}), strategy=caller)
        self._contents, self._nodes, self._size, self._exchange = contents, nodes, size, exchange
        self._client_of = {nodes[k]: k for k in contents}
        self.mean: Vector | None = None
        self.metrics: dict[int, dict[str, float]] = {}  # by client
        self.missing: dict[int, str] = {}  # why clients gave no answer in a stage
        self.wrong: dict[int, str] = {}  # why clients' answers in the last stage were invalid
        self.failure = "too few clients are left for secure aggregation"

    def run(self, stage: str) -> bool:
        """Run one stage of the workflow; return whether the next one can follow with the same clients."""
        try:
            done: bool = getattr(self._workflow, stage)(self._caller, self._context, self._state)
        except UserError:  # the server's own, such as a spent budget
            raise
        except Exception as error:  # a client may send invalid keys or shares
            self.failure = f"secure aggregation failed: {type(error).__name__}: {error}"
            return False
        return done and not (self.missing and stage in ("setup_stage", "share_keys_stage"))

    def unmask(self) -> None:
        """Run the last stage; keep no mean that is beyond the range of weights."""
        self.run("unmask_stage")
        if self.mean is not None and not bool((np.abs(self.mean) <= 1.01 * self._workflow.clipping_range).all()):
            self.mean = None
            self.failure = (
                "secure aggregation failed: the sum of the masked weights is none of weights in range, so one of the "
                "sites in it has sent other numbers, and the masks hide which: stop one SuperNode after the other and "
                "run again, to see without which the sum is right"
            )

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[Any, FitIns]]:
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self._client_of]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        [self.mean] = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}

    def send_and_receive(self, messages: list[FlowerMessage], *, timeout: float | None = None) -> list[Any]:
        """Return the clients' valid answers in a stage; put the round's message around the one stage that needs it."""
        asked: dict[int, dict[str, Any]] = {}
        sent, collects = {}, False
        for message in messages:
            k = self._client_of[message.metadata.dst_node_id]
            asked[k] = dict(message.content[RECORD_KEY_CONFIGS])  # Flower shares one
            collects = asked[k][Key.STAGE] == Stage.COLLECT_MASKED_VECTORS
            whole = self._contents[k] if collects else {"task": self._contents[k]["task"]}
            sent[k] = RecordDict({**whole, RECORD_KEY_CONFIGS: ConfigRecord(asked[k])})
        received, missing = self._exchange(sent, collects)
        answers: dict[int, RecordDict] = {}
        for k, content in received.items():
            try:
                if not collects:
                    _require_valid(self._nodes[k], asked[k], config_of(content, RECORD_KEY_CONFIGS))
                answers[k] = self._flower_form(k, content) if collects else content
            except UserError as error:
                missing[k] = one_line(str(error))
                if asked[k][Key.STAGE] == Stage.UNMASK:
                    self.wrong[k] = missing[k]
        self.missing |= missing
        sources = {k: SimpleNamespace(src_node_id=self._nodes[k]) for k in answers}
        return [SimpleNamespace(metadata=sources[k], content=answers[k], has_error=lambda: False) for k in answers]

    def _flower_form(self, client: int, content: RecordDict) -> RecordDict:
        """Return masked weights as Flower has them: the weight and the weighted parameters, in int64."""
        message = from_records(content)
        masked = message.tensors.get(_MASKED)
        if masked is None or masked.dtype != torch.int32 or masked.shape != (1 + self._size,):
            got = "none" if masked is None else f"{masked.dtype} {list(masked.shape)}"
            raise UserError(f"its masked weights are invalid: expected torch.int32 [{1 + self._size}], got {got}")
        self.metrics[client] = message.metrics
        integers = masked.numpy().view(np.uint32).astype(np.int64)
        result = fitres_to_recorddict(FitRes(Status(Code.OK, ""), Parameters([], ""), 0, {}), True)
        parts = [ndarray_to_bytes(part) for part in (integers[:1], integers[1:])]
        result[RECORD_KEY_CONFIGS] = ConfigRecord({Key.MASKED_PARAMETERS: parts})
        return result


def _require_valid(node: int, asked: dict[str, Any], answer: dict[str, Any]) -> None:
    """Raise UserError where a node's answer in a stage without weights is none that Flower's code can go on with."""

    def lists(names: str, values: str, expected: set[int]) -> bool:
        nodes, data = answer.get(names), answer.get(values)
        return (
            isinstance(nodes, list)
            and isinstance(data, list)
            and len(nodes) == len(data)
            and sorted(map(repr, nodes)) == sorted(map(repr, expected))
            and all(type(one) is bytes for one in data)
        )

    stage = asked[Key.STAGE]
    if stage == Stage.SETUP:
        keys = [answer.get(name) for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)]
        valid = keys[0] != keys[1] and all(map(_is_public_key, keys))
    elif stage == Stage.SHARE_KEYS:
        others = {int(name) for name in asked if name != Key.STAGE} - {node}
        valid = lists(Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, others)
    else:
        neighbours = {*asked[Key.ACTIVE_NODE_ID_LIST], *asked[Key.DEAD_NODE_ID_LIST]}
        valid = lists(Key.NODE_ID_LIST, Key.SHARE_LIST, neighbours)
        valid = valid and all(len(share) % 16 == 4 for share in answer[Key.SHARE_LIST])
    if not valid:
        raise UserError(f"its answer in the stage {stage} of the secure aggregation is invalid")


def _is_public_key(data: Any) -> bool:
    try:
        key: Any = bytes_to_public_key(data)
        return bool(key.curve.name == "secp384r1")  # that of Flower's own keys
    except Exception:
        return False
