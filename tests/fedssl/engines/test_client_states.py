"""Where clients' states live: the same run either way, and on the disk memory does not grow with the clients."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from fedssl import method
from fedssl.engines import rounds
from fedssl.engines.in_process import ClientStates, resume, run
from fedssl.engines.observers import Observer
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, METHODS

DATA = {"name": "digits", "train_limit": 900, "test_limit": 60}


def states(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "checkpoints").iterdir() if file.suffix == ".safetensors"}


class Gauge(Observer):
    """Counts what is alive when the first and the last client are about to begin: models, and bytes of tensors."""

    def __init__(self) -> None:
        self.models: list[int] = []
        self.tensor_bytes: list[int] = []

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if position not in (0, clients - 1):
            return
        gc.collect()
        alive = gc.get_objects()
        self.models.append(sum(type(thing) is Model for thing in alive))
        storages = {}
        for thing in alive:
            if holds_data(thing):
                storages[thing.data_ptr()] = thing.untyped_storage().nbytes()
        self.tensor_bytes.append(sum(storages.values()))


def holds_data(thing: object) -> bool:
    """Not so what torch.compile and torch.func keep of tests before: fake tensors, and wrappers of other tensors."""
    if type(thing) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(thing):
        return False
    return thing.device.type == "cpu" and thing.layout == torch.strided


def gauge(tiny, path: Path, clients: int, **changes) -> tuple[int, int, int]:
    """From the first client to the last: growth in live models and in live bytes; and the bytes of one state."""
    partition = {"name": "iid", "clients": clients}
    seen = Gauge()
    directory = run(tiny(data=DATA, partition=partition, rounds=1, **changes), path, seen)
    (models, last_models), (size, last_size) = seen.models, seen.tensor_bytes
    return last_models - models, last_size - size, directory.client_state(0).num_bytes


def test_on_the_disk_memory_does_not_grow_with_the_clients(tiny, tmp_path, monkeypatch):
    """All K clients take part in one round, each leaves a state; nothing but the states differs with K."""
    # what takes the time, and keeps nothing
    monkeypatch.setattr(rounds, "_evaluate", lambda *arguments: [])
    monkeypatch.setattr(method, "train_locally", lambda *arguments: None)
    growth = {}
    for place, clients in (("disk", 10), ("disk", 100), ("memory", 30)):
        path = tmp_path / f"{place}-{clients}"
        models, growth[place, clients], state = gauge(tiny, path, clients, client_states=place)
        # the model of the client before, which the next one replaces
        assert models <= 1
        assert len(states(path)) == clients + 1
    assert growth["disk", 10] < 2 * state
    assert growth["disk", 100] < 2 * state
    # the measure sees states where they are kept: all but the last client's
    assert growth["memory", 30] > 28 * state


@pytest.mark.parametrize(
    "kind", [{}, ALIGNED, AVERAGED | {"clients_per_round": 2}], ids=["local", "aligned", "sampled"]
)
def test_both_places_give_the_same_run(kind, tiny, tmp_path):
    for place in ("disk", "memory"):
        run(tiny(**kind, rounds=3, client_states=place), tmp_path / place)
    assert states(tmp_path / "disk") == states(tmp_path / "memory")
    assert (tmp_path / "disk" / "metrics.csv").read_bytes() == (tmp_path / "memory" / "metrics.csv").read_bytes()


class Stopped(Exception):
    pass


class StopInRoundTwo(Observer):
    """Stops a run when the second client of the second round is about to begin."""

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if (round_number, position) == (2, 1):
            raise Stopped


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_round_that_was_cut_off_leaves_no_state_behind(place, tiny, tmp_path):
    recipe = tiny(**AVERAGED, rounds=3, client_states=place)
    run(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        run(recipe, tmp_path / "cut", StopInRoundTwo())
    manifest = json.loads((tmp_path / "cut" / "checkpoints" / "manifest.json").read_text())
    assert manifest["round"] == 1
    # the first client's state of round 2 lies there, and nothing points at it
    assert (tmp_path / "cut" / "checkpoints" / "client-0000.round-00002.safetensors").is_file()
    assert set(manifest["files"].values()) == {f"{w}.round-00001.safetensors" for w in
                                               ("server", "client-0000", "client-0001", "client-0002")}  # fmt: skip
    resume(tmp_path / "cut")
    assert states(tmp_path / "cut") == states(tmp_path / "whole")


def test_cross_device_clients_are_sampled_and_only_they_have_a_state(tiny, tmp_path):
    partition = {"name": "dirichlet_equal", "clients": 100, "alpha": 0.1, "min_samples": 8}
    recipe = tiny(**AVERAGED, data=DATA, partition=partition, clients_per_round=10)
    directory = run(recipe, tmp_path / "a")
    rows = directory.read_metrics()
    sampled = {number: {who for n, who, m, _ in rows if (n, m) == (number, "bytes_up")} for number in (1, 2)}
    assert [len(who) for who in sampled.values()] == [10, 10]
    assert sampled[1] != sampled[2]
    stored = {int(name[7:11]) for name in directory.checkpoint.files if name.startswith("client-")}
    assert stored == {int(who) for who in sampled[1] | sampled[2]}


def test_a_state_in_memory_is_the_keepers_own(tmp_path):
    directory = RunDirectory.create(tmp_path / "run", {"recipe.yaml": ""})
    kept = ClientStates(directory, "memory")
    kept.store(3, 1, Message({"a": torch.zeros(2)}, {"n": 1.0}))
    kept.load(3).tensors["a"] += 1
    assert kept.load(3).tensors["a"].tolist() == [0.0, 0.0]
    assert kept.load(4).tensors == {}


@pytest.mark.parametrize("name", METHODS)
def test_a_reused_model_leaves_no_trace_of_the_client_before(noisy, one_thread, name):
    """A client that is loaded into another's model answers bit for bit like one with a model built anew."""
    federation = build_federation(noisy(**METHODS[name] | {"architectures": ["small_convnet"]}))
    part = federation.method
    server, kept, used = part.initial_state(), {}, federation.new_model(0)
    for number in range(0 if part.opening_round else 1, 3):
        sent = part.broadcast(server, [0, 1], number) if number else part.broadcast_opening(server, [0, 1])
        replies = {}
        for k in (0, 1):
            built = federation.client(k, kept.get(k, Message()))
            reused = federation.client(k, kept.get(k, Message()), used)
            assert (reused.model is used) == (k in kept or part.starts_from_server)
            expected = part.client_round(built, sent[k], number)
            replies[k] = part.client_round(reused, sent[k], number)
            assert replies[k].metrics == expected.metrics
            assert_equal(replies[k], expected)
            kept[k], used = federation.client_state(reused, number), reused.model
            assert_equal(kept[k], federation.client_state(built, number))
        server = part.aggregate(server, replies, number)


def assert_equal(message: Message, expected: Message) -> None:
    assert message.numbers == expected.numbers
    assert message.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(message.tensors[name], tensor), name
