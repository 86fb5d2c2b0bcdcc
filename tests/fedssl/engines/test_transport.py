"""`transport`: what is rounded, how many bytes travel, and that a run stays a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedssl.engines.in_process import resume, run
from fedssl.federation import build_federation
from fedssl.messages import Message, from_transport, to_transport
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import SMALL, contents, stopped_before_commit

KINDS = {
    "weights": AVERAGED,
    "layers": LW_FEDSSL,
    "factors": ALIGNED,
    "kernels": ALIGNED
    | {
        "architectures": ["small_convnet"],
        "aggregators": [{"name": "representation_mean", "send": "kernel"}],
    },
    "dictionary": AVERAGED
    | {
        "objective": {"name": "simclr", "hidden_features": 32, "output_features": 16},
        "aggregators": ["weighted_mean", {"name": "dictionary"}],
    },
}
#: of the bytes of float32; numbers, metrics and integers travel as they are, and with int8 vectors and scales
SHARES = {"bfloat16": 0.53, "int8": 0.31}
#: which runs are stopped in their second round, too
STOPPED = {("weights", "int8"), ("layers", "bfloat16"), ("factors", "int8"), ("dictionary", "bfloat16")}


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
    expected = [1, 1 + 2**-6, 1 + 2**-7, -1]
    assert received.tensors["w"][:4].tolist() == expected
    assert received.tensors["w"].dtype == torch.float32
    assert received.tensors["w"].isfinite().all()
    for name, tensor in other.items():
        assert sent.tensors[name] is tensor
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


def traffic(path: Path, name: str) -> list[float]:
    return [value for _, _, metric, value in RunDirectory.open(path).read_metrics() if metric == name]


@pytest.mark.parametrize("transport", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bytes_travel_and_a_stopped_run_continues_bit_for_bit(kind, transport, finished, tiny, tmp_path):
    recipe = tiny(**KINDS[kind] | SMALL, transport=transport)
    whole, rounded = finished(tiny(**KINDS[kind] | SMALL)), run(recipe, tmp_path / "a").path
    for name in ("bytes_up", "bytes_down"):
        assert len(traffic(whole, name)) == len(traffic(rounded, name))
        assert sum(traffic(rounded, name)) <= SHARES[transport] * sum(traffic(whole, name))
    assert (rounded / "metrics.csv").read_bytes() != (whole / "metrics.csv").read_bytes()
    if (kind, transport) in STOPPED:
        with stopped_before_commit(2):
            run(recipe, tmp_path / "stopped")
        resume(tmp_path / "stopped")
        assert contents(tmp_path / "stopped") == contents(rounded)


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
