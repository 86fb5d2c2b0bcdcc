"""Messages as Flower's records: what travels arrives as it was, and broken records are refused."""

from __future__ import annotations

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedssl.engines.flower.wire import from_records, to_records
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe


def test_every_dtype_travels_as_it_is():
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    tensors = {str(dtype): (torch.rand(3, 5) * 100).to(dtype) for dtype in dtypes}
    tensors |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(7), "empty": torch.empty(0, 4)}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["not finite"] = torch.tensor([float("nan"), float("inf")])
    message = Message(
        tensors, {"samples": 3, "loss": 0.1}, {"layer": "encoder", "centered": True, "rounds": 2, "t": 0.5}
    )
    records = to_records(message)
    inflated = RecordDict.inflate(records.deflate(), records.children)
    for name, record in inflated.items():
        inflated[name] = type(record).inflate(record.deflate(), record.children)
    received = from_records(inflated)
    assert list(received.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(received.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert (received.numbers, received.config) == (message.numbers, message.config)
    assert type(received.numbers["samples"]) is int


def floats(count: int, dtype: str = "float32", serialisation: str = "torch.raw") -> Array:
    return Array(dtype, (count,), serialisation, bytes(4 * count))


LAYOUT = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "dimensions": [2, 0], "sizes": [2, 3]}


INVALID = "the message's layout is invalid: expected the names"


@pytest.mark.parametrize(
    ("arrays", "layout", "expected"),
    [
        ({"float32": floats(5)}, {}, r"the tensor a of float32 \[2, 3\] needs 24 bytes, got 20"),
        ({"float32": floats(6)}, {}, r"the tensor b of float32 \[\] needs 4 bytes, got 0"),
        ({"float32": floats(8)}, {}, "the array float32 has 32 bytes, but its tensors have 28"),
        (
            {"float32": floats(7), "int32": floats(1, "int32")},
            {},
            "the array int32 has 4 bytes, but its tensors have 0",
        ),
        (
            {"float32": floats(7, serialisation="numpy.ndarray")},
            {},
            "the array float32 is invalid: expected torch.raw float32, got numpy.ndarray float32",
        ),
        (
            {"float32": floats(7, "int32")},
            {},
            "the array float32 is invalid: expected torch.raw float32, got torch.raw int32",
        ),
        ({}, {}, "the array float32 of the tensor a is missing"),
        ({"float32": floats(7)}, {"dtypes": ["object"] * 2}, INVALID),
        ({"float32": floats(7)}, {"names": ["a", "a"]}, INVALID),
        ({"float32": floats(7)}, {"names": ["a"]}, INVALID),
        ({"float32": floats(7)}, {"names": "ab"}, INVALID),
        ({"float32": floats(7)}, {"sizes": [2]}, INVALID),
        ({"float32": floats(7)}, {"sizes": [-2, -3]}, INVALID),
        ({"float32": floats(7)}, {"sizes": [2.0, 3.0]}, INVALID),
        (
            {"float32": floats(7)},
            {"sizes": [10**9, 10**9]},
            "the tensor a of float32 .* needs 4000000000000000000 bytes, got 28",
        ),
        ({"float32": floats(7)}, {"dimensions": [3, -1]}, INVALID),
    ],
)
def test_invalid_records_are_refused(arrays, layout, expected):
    records = to_records(Message())
    records["tensors"] = ArrayRecord(arrays)
    records["layout"] = ConfigRecord(LAYOUT | layout)
    with pytest.raises(UserError, match=expected):
        from_records(records)


def test_what_flower_sends_is_the_message_and_little_more():
    """Bytes of all of a Flower message's objects against `num_bytes`, which is what a run's metrics hold."""
    recipe = load_recipe("fedu2")
    federation = build_federation(recipe)
    message = federation.method.broadcast(federation.method.initial_state(), [0], 1)[0]
    content = to_records(message)
    content["task"] = ConfigRecord({"run": "0" * 16, "client": 0, "round": 1, "start": -1, "seconds": 3600.0})
    sent = FlowerMessage(content, dst_node_id=1, message_type="train", ttl=10.0)
    parts = get_all_nested_objects(sent).values()
    assert message.num_bytes < sum(len(part.deflate()) for part in parts) < 1.01 * message.num_bytes
    assert len(parts) < 15 < len(message.tensors)  # each is sent by a request of its own
