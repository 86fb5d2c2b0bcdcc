import json

import pytest
import torch
from safetensors.torch import save
from torch._subclasses.fake_tensor import FakeTensorMode

from fedssl.messages import Message, merge
from fedssl.run_folder.storage import read_message, write_message


def test_bytes_are_the_tensors_data_and_eight_a_number():
    message = Message(
        {"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.float16)}, {"samples": 4}, {}, {"cka": 1}
    )
    assert message.num_bytes == 3 * 2 * 4 + 5 * 2 + 8 + 8


def test_a_copy_shares_no_memory_and_carries_no_gradient():
    tensor = torch.ones(2, requires_grad=True)
    copy = Message({"a": tensor}).copy()
    with torch.no_grad():
        tensor.fill_(7)
    assert copy.tensors["a"].tolist() == [1, 1]
    assert not copy.tensors["a"].requires_grad


def test_metrics_are_merged_and_a_name_that_two_parts_send_is_refused():
    assert merge([Message(metrics={"loss": 0.5}), Message(metrics={"cka": 1.0})]).metrics == {"loss": 0.5, "cka": 1.0}
    with pytest.raises(ValueError, match="both send 'a'"):
        merge([Message({"a": torch.zeros(1)}), Message({"a": torch.zeros(1)})])


def test_a_stored_message_comes_back_bit_for_bit(tmp_path):
    tensors = {
        "weights": torch.randn(4, 3),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(12),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(4, 3).T,
    }
    message = Message(tensors, {"loss": 0.1 + 0.2, "samples": 3}, {"layer": "encoder", "centered": True}, {"cka": 0.5})
    write_message(tmp_path / "m.safetensors", message)
    back = read_message(tmp_path / "m.safetensors")
    assert (back.numbers, back.config, back.metrics) == (message.numbers, message.config, message.metrics)
    assert message.copy().metrics == {"cka": 0.5}
    assert back.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor)


def test_a_state_of_an_earlier_version_is_read(tmp_path):
    """There a metric was a number whose name began with metric/."""
    numbers = {"rounds_taken": 2.0, "metric/eua_weight/3": 0.25}
    header = {"message": json.dumps({"numbers": numbers, "config": {"form": "mean"}})}
    (tmp_path / "state").write_bytes(save({"a": torch.ones(2)}, metadata=header))
    state = read_message(tmp_path / "state")
    assert state.numbers == {"rounds_taken": 2.0}
    assert state.config == {"form": "mean"}
    assert state.metrics == {"eua_weight/3": 0.25}


def test_a_copy_is_on_the_cpu_wherever_the_message_is():
    """The card holds one client's model, however many answer."""
    with FakeTensorMode():
        reply = Message({"weight": torch.empty(3, device="cuda")}).copy()
    assert reply.tensors["weight"].device.type == "cpu"
