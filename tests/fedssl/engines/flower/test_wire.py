"""Messages as Flower's records, and answers on the server's disk: the same bits, and broken records are refused."""

import gc
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedssl.engines.flower import wire
from fedssl.engines.flower.wire import from_records, on_disk, to_records, to_shared_records
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.run_folder.storage import safetensors_parts
from tests.fedssl.data.data_files import full_disk
from tests.fedssl.engines.every_tensor import assert_same, every_kind_of_tensor


@pytest.fixture
def every_answer(monkeypatch) -> None:
    """Small answers go to the disk, too."""
    monkeypatch.setattr(wire, "_SMALL_ANSWER", 0)


def through_records(message: Message, folder: Path) -> Message:
    records = to_records(message)
    inflated = RecordDict.inflate(records.deflate(), records.children)
    for name, record in inflated.items():
        inflated[name] = type(record).inflate(record.deflate(), record.children)
    return from_records(inflated)


@pytest.mark.parametrize("way", [through_records, on_disk])
def test_a_message_arrives_bit_for_bit(way, every_answer, tmp_path):
    message = every_kind_of_tensor()
    received = way(message, tmp_path)
    assert_same(received, message)
    assert list(received.tensors) == list(message.tensors)
    if way is on_disk:
        assert all(tensor.data_ptr() % 64 == 0 for tensor in received.tensors.values())


def changed(array: bytes | None, names: object) -> RecordDict:
    """The records of a message of the tensors a and b with other content; None for that of the message."""
    records = to_records(Message({"a": torch.ones(2, 3), "b": torch.ones(())}))
    if array is not None:
        records["tensors"] = ArrayRecord({"safetensors": Array("uint8", (len(array),), "safetensors", array)})
    records["layout"] = ConfigRecord({"names": names})
    return records


WHOLE = bytes(changed(None, ["a", "b"])["tensors"]["safetensors"].data)
LARGER = WHOLE.replace(b"[2, 3]", b"[2, 9]")
COMPLEX = b"".join(safetensors_parts({"a": torch.ones(1, dtype=torch.complex64)}, {}))


@pytest.mark.parametrize(
    ("array", "names", "expected"),
    [
        (WHOLE[:-4], ["a", "b"], r"the message's tensors cannot be read \(Error while deserializing"),
        (LARGER, ["a", "b"], r"the message's tensors cannot be read \(Error while deserializing"),
        (b"", ["a", "b"], r"the message's tensors cannot be read \(Error while deserializing"),
        (None, ["a", "c"], r"the message's tensors cannot be read \('c'\)"),
        (None, 1, r"the message's tensors cannot be read \(.*not iterable"),
        (None, ["a"], "the message has tensors that it does not name"),
        (None, ["a", "b", "a"], "the message has tensors that it does not name"),
        (COMPLEX, ["a"], "the message has tensors of torch.complex64"),
    ],
)
def test_invalid_records_are_refused(array, names, expected):
    assert list(from_records(changed(None, ["b", "a"])).tensors) == ["b", "a"]
    with pytest.raises(UserError, match=expected):
        from_records(changed(array, names))


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


def test_messages_with_the_same_tensors_share_their_arrays():
    weights, other = {"w": torch.rand(5)}, {"w": torch.rand(5)}
    messages = {0: Message(weights, {"n": 1}), 1: Message(dict(weights), {"n": 2}), 2: Message(other, {"n": 3})}
    records = to_shared_records(messages)
    data = [records[k]["tensors"]["safetensors"].data for k in range(3)]
    assert data[0] is data[1]
    assert data[0] is not data[2]
    for k, message in messages.items():
        assert_same(from_records(records[k]), message)


# Answers on the disk


def mappings(folder: Path) -> list[str]:
    """The files of a folder that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {folder}/" in line]


def test_the_file_has_no_name_and_ends_with_its_message(every_answer, tmp_path):
    message = on_disk(Message({"a": torch.ones(1000)}), tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(mappings(tmp_path)) == 1
    del message
    gc.collect()
    assert not mappings(tmp_path)


def test_a_small_message_and_one_for_which_the_disk_has_no_space_stay_in_memory(tmp_path):
    small = Message({"a": torch.ones(10)})
    assert on_disk(small, tmp_path) is small
    message = Message({"a": torch.ones(2**18)})
    with full_disk(1000):
        assert on_disk(message, tmp_path) is message
