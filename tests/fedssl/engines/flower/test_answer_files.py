"""Answers on the server's disk: the same bits, and no name in the folder."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch

from fedssl.engines import in_process
from fedssl.engines.flower import wire
from fedssl.engines.flower.wire import from_records, on_disk, to_shared_records
from fedssl.messages import Message
from tests.fedssl.engines.flower.loop_grid import KINDS, run_on, start
from tests.fedssl.engines.stopped_runs import contents


@pytest.fixture
def every_answer(monkeypatch) -> None:
    """Small answers go to the disk, too."""
    monkeypatch.setattr(wire, "_SMALL_ANSWER", 0)


def mappings(folder: Path) -> list[str]:
    """The files of a folder that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {folder}/" in line]


def test_a_message_is_read_back_bit_for_bit(every_answer, tmp_path):
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    tensors = {str(dtype): (100 * torch.rand(3, 5)).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 4), "transposed": torch.rand(4, 6).T}
    tensors["nan"] = torch.full((2,), float("nan"))
    message = Message(tensors, {"samples": 3}, {"name": "x"}, {"loss": 0.5})
    read = on_disk(message, tmp_path)
    assert (read.numbers, read.config, read.metrics) == (message.numbers, message.config, message.metrics)
    assert list(read.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert read.tensors[name].dtype == tensor.dtype
        assert torch.equal(read.tensors[name].nan_to_num(9), tensor.nan_to_num(9)), name
        assert read.tensors[name].data_ptr() % 64 == 0


def test_the_file_has_no_name_and_ends_with_its_message(every_answer, tmp_path):
    message = on_disk(Message({"a": torch.ones(1000)}), tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(mappings(tmp_path)) == 1
    del message
    gc.collect()
    assert not mappings(tmp_path)


def test_a_small_message_stays_in_memory(tmp_path):
    message = Message({"a": torch.ones(10)})
    assert on_disk(message, tmp_path) is message


def test_without_space_on_the_disk_it_stays_in_memory(every_answer, tmp_path):
    message = Message({"a": torch.ones(10_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert on_disk(message, tmp_path) is message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["hetero_ssfl", "fedu2", "lw_fedssl", "weighted_mean", "lw_fedssl, bfloat16"])
def test_a_run_with_its_answers_on_the_disk_is_the_one_in_this_process_bit_for_bit(
    kind, tiny, tmp_path, every_answer, monkeypatch
):
    mapped = []
    monkeypatch.setattr(
        "fedssl.engines.flower.server.on_disk",
        lambda message, folder: mapped.append(on_disk(message, folder)) or mapped[-1],
    )
    recipe = tiny(**KINDS[kind])
    in_process.run(recipe, tmp_path / "a")
    run_on(recipe, *start(recipe, tmp_path / "b"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(mappings(tmp_path / "b")) == len(mapped) > 0
    widened = [m for m in mapped if all(t.dtype == torch.float32 for t in m.tensors.values() if t.is_floating_point())]
    assert len(widened) == (len(mapped) / 2 if "bfloat16" in kind else len(mapped))


def test_messages_with_the_same_tensors_share_their_arrays():
    weights, other = {"w": torch.rand(5)}, {"w": torch.rand(5)}
    messages = {0: Message(weights, {"n": 1}), 1: Message(dict(weights), {"n": 2}), 2: Message(other, {"n": 3})}
    records = to_shared_records(messages)
    data = {k: content["tensors"]["float32"].data for k, content in records.items()}
    assert data[0] is data[1]
    assert data[0] is not data[2]
    for k, message in messages.items():
        read = from_records(records[k])
        assert torch.equal(read.tensors["w"], message.tensors["w"])
        assert read.numbers == message.numbers
