"""Messages: copies and merging, how `transport` rounds them, and that a rounded run stays a run."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedssl.engines.in_process import resume, run
from fedssl.federation import build_federation
from fedssl.messages import Message, from_transport, merge, to_transport
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import SMALL, contents, stopped_before_commit

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_copy_shares_no_memory_carries_no_gradient_and_is_on_the_cpu():
    """The card holds one client's model, however many answer."""
    tensor = torch.ones(2, requires_grad=True)
    copy = Message({"a": tensor}, metrics={"cka": 0.5}).copy()
    with torch.no_grad():
        tensor.fill_(7)
    assert copy.tensors["a"].tolist() == [1, 1]
    assert not copy.tensors["a"].requires_grad
    assert copy.metrics == {"cka": 0.5}
    with FakeTensorMode():
        reply = Message({"weight": torch.empty(3, device="cuda")}).copy()
    assert reply.tensors["weight"].device.type == "cpu"


def test_metrics_are_merged_and_a_name_that_two_parts_send_is_refused():
    assert merge([Message(metrics={"loss": 0.5}), Message(metrics={"cka": 1.0})]).metrics == {"loss": 0.5, "cka": 1.0}
    with pytest.raises(ValueError, match="both send 'a'"):
        merge([Message({"a": torch.zeros(1)}), Message({"a": torch.zeros(1)})])


# What travels


def test_float32_is_rounded_half_to_even_and_nothing_else_is():
    # bfloat16 has 8 bits: next to 1 are 1 + 2^-7 and 1 + 2^-6, and a half goes to the even neighbour
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8), 3e38])
    other = {
        "counter": torch.tensor(2**40 + 1),
        "kernel64": torch.tensor([1 + 2**-30], dtype=torch.float64),
        "half": torch.tensor([1 + 2**-10], dtype=torch.float16),
    }
    message = Message({"w": values, **other}, {"samples": 7.5}, {"layer": "encoder"}, {"loss": 0.1})
    [sent] = to_transport({3: message}, "bfloat16").values()
    assert sent.tensors["w"].dtype == torch.bfloat16
    received = from_transport(sent, "bfloat16")
    assert received.tensors["w"][:4].tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1]
    assert received.tensors["w"].dtype == torch.float32
    assert received.tensors["w"].isfinite().all()
    assert all(sent.tensors[name] is tensor for name, tensor in other.items())
    assert (sent.numbers, sent.config, sent.metrics) == (message.numbers, message.config, message.metrics)
    assert message.num_bytes - sent.num_bytes == 2 * len(values)
    assert torch.equal(message.tensors["w"], values)
    assert to_transport({3: message}, "float32")[3] is message
    shared = to_transport({0: message, 1: Message({"w": values})}, "bfloat16")
    assert shared[0].tensors["w"] is shared[1].tensors["w"]  # what clients share is rounded once


def test_int8_has_a_scale_for_each_matrix():
    weight = torch.tensor([[-2.54, 1.0, 0.011], [0.0101, 0.0, 2.0]])
    other = {
        "variance": torch.tensor([1e-6, 1.0]),
        "kernel64": torch.rand(2, 2, dtype=torch.float64),
        "own": torch.ones(2, 2, dtype=torch.int8),
        "empty": torch.zeros(0, 3),
    }
    message = Message({"w": weight, "zero": torch.zeros(2, 2), **other}, {"samples": 7.5}, {"layer": "encoder"})
    sent, shared = to_transport({3: message, 4: message}, "int8").values()
    assert sent.tensors["w"] is shared.tensors["w"]
    assert sent.tensors["w"].tolist() == [[-127, 50, 1], [1, 0, 100]]  # of 0.02 each, half to even
    assert sent.tensors["w"].dtype == torch.int8
    assert all(sent.tensors[name] is tensor for name, tensor in other.items())
    assert message.num_bytes - sent.num_bytes == 3 * (6 + 4) - 2 * 8
    received = from_transport(sent, "int8")
    torch.testing.assert_close(received.tensors["w"], torch.tensor([[-2.54, 1.0, 0.02], [0.02, 0.0, 2.0]]))
    assert received.tensors["zero"].tolist() == [[0, 0], [0, 0]]
    assert received.tensors["own"] is other["own"]
    assert (received.numbers, received.config) == (message.numbers, message.config)
    for value in (float("nan"), float("inf")):  # is not hidden
        [sent] = to_transport({0: Message({"w": torch.tensor([[1.0, value]])})}, "int8").values()
        assert from_transport(sent, "int8").tensors["w"].isnan().all()


#: of the bytes of float32; numbers, metrics and integers travel as they are, and with int8 vectors and scales
SHARES = {"bfloat16": 0.53, "int8": 0.31}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights": ("int8", AVERAGED),
    "layers": ("bfloat16", LW_FEDSSL),
    "kernels": ("int8", ALIGNED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bytes_travel_and_a_stopped_run_continues_bit_for_bit(kind, finished, tiny, tmp_path):
    transport, changes = KINDS[kind]
    recipe = tiny(**changes | SMALL, transport=transport)
    whole, rounded = read_run(finished(tiny(**changes | SMALL))), read_run(run(recipe, tmp_path / "a").path)
    assert whole.values.keys() == rounded.values.keys()
    for name in ("bytes_up", "bytes_down"):
        assert 0 < rounded.total(name) <= SHARES[transport] * whole.total(name)
    assert rounded.overall("loss") != whole.overall("loss")
    with stopped_before_commit(2):
        run(recipe, tmp_path / "stopped")
    resume(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(rounded.path)


def test_the_server_computes_in_float32(tiny, tmp_path):
    recipe = tiny(**AVERAGED, transport="bfloat16")
    method = build_federation(recipe).method
    server = method.initial_state()
    name = next(n for n, t in server.tensors.items() if t.dtype == torch.float32 and n.startswith("online."))
    low, high = (torch.full_like(server.tensors[name], value, dtype=torch.bfloat16) for value in (1.0, 1 + 2**-7))
    rest = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in server.tensors.items()}
    replies = {k: Message(rest | {name: t}, {"samples": 1.0}) for k, t in enumerate((low, high))}
    state = method.aggregate(server, replies, 1)
    assert state.config == {}
    assert state.tensors[name].dtype == torch.float32
    assert torch.equal(state.tensors[name], torch.full_like(state.tensors[name], 1 + 2**-8))  # no bfloat16 number
