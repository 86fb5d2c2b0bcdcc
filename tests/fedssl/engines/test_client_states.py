"""Clients' states: where they live, that memory does not grow with the clients, and that they hold what is needed."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl import method
from fedssl.engines import rounds
from fedssl.engines.in_process import ClientStates, resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.models.model import Model
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL, METHODS
from tests.fedssl.engines.short_runs import Stopped, StopsInRoundTwo

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
    "kind", [ALIGNED, AVERAGED | {"clients_per_round": 2, "rounds": 3}], ids=["aligned", "sampled"]
)
def test_both_places_give_the_same_run(kind, finished, tiny):
    disk, memory = (finished(tiny(**kind, client_states=place)) for place in ("disk", "memory"))
    assert states(disk) == states(memory)
    assert (disk / "metrics.csv").read_bytes() == (memory / "metrics.csv").read_bytes()


def test_a_round_that_was_cut_off_leaves_no_state_behind(finished, tiny, tmp_path):
    recipe = tiny(**AVERAGED, client_states="memory")
    with pytest.raises(Stopped):
        run(recipe, tmp_path / "cut", StopsInRoundTwo())
    manifest = json.loads((tmp_path / "cut" / "checkpoints" / "manifest.json").read_text())
    assert manifest["round"] == 1
    # the first client's state of round 2 lies there, and nothing points at it
    assert (tmp_path / "cut" / "checkpoints" / "client-0000.round-00002.safetensors").is_file()
    assert set(manifest["files"].values()) == {f"{w}.round-00001.safetensors" for w in
                                               ("server", "client-0000", "client-0001", "client-0002")}  # fmt: skip
    resume(tmp_path / "cut")
    assert states(tmp_path / "cut") == states(finished(recipe))


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
def test_a_reused_model_leaves_no_trace_of_the_client_before(noisy, name):
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


# What is stored of a client between its rounds


SIMCLR: dict[str, Any] = {"name": "simclr", "hidden_features": 32, "output_features": 16}
CONTRAST: dict[str, Any] = {"regularizers": ["representation_alignment"]}
#: changes of the tiny recipe, and the networks that are stored
STORED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fedbyol": (AVERAGED, {"target"}),
    "fedsimclr": (AVERAGED | {"objective": SIMCLR}, set()),
    "fedema": (AVERAGED | {"local_update": "fedema"}, {"online", "target"}),
    "moon": (AVERAGED | CONTRAST, {"online", "target"}),
    "personal": (AVERAGED | {"local_update": "personal"}, {"online", "target"}),
    "hetero_ssfl": (ALIGNED, {"online", "target"}),
    "lw_fedssl": (LW_FEDSSL, {"online"}),  # two rounds
}


@pytest.mark.parametrize("method", STORED)
def test_a_state_holds_what_the_next_round_needs(method, tiny, tmp_path):
    changes, networks = STORED[method]
    federation = build_federation(tiny(**changes))
    client = federation.client(0, Message())
    stored = {name.split(".")[0] for name in federation.client_state(client, 1).tensors if name.startswith("model/")}
    assert stored == {f"model/{network}" for network in networks}
    whole = {f"model/{name}" for name in client.model.state_dict()}
    assert set(federation.client_state(client, 2).tensors) == whole  # for reports of local models


@pytest.mark.parametrize("method", STORED)
def test_nothing_is_missing(method, finished, tiny, tmp_path, monkeypatch):
    """Metrics and the server's state are those of a run that stores whole models and builds each one anew.

    Two of three clients take part in a round, so that models are reused and clients return.
    """
    place = "memory" if method in ("fedbyol", "moon", "hetero_ssfl") else "disk"
    changes = STORED[method][0] | {"clients_per_round": 2, "client_states": place}
    if method != "lw_fedssl":
        changes["rounds"] = 4
    if method == "hetero_ssfl":
        changes["architectures"] = ["small_convnet"]
    kept = finished(tiny(**changes))
    monkeypatch.setattr(Method, "starts_from_server", False)
    monkeypatch.setattr(Method, "kept_entries", lambda self, model: list(model.state_dict()))
    load = Federation.client
    monkeypatch.setattr(Federation, "client", lambda self, index, state, reused=None: load(self, index, state))
    whole = run(tiny(**changes), tmp_path / "whole").path
    assert (kept / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert_equal(RunDirectory.open(kept).server_state(), RunDirectory.open(whole).server_state())


def test_a_state_without_what_is_needed_is_refused(tiny):
    federation = build_federation(tiny(**AVERAGED | {"rounds": 2}))
    client = federation.client(0, Message())
    client.memory.numbers["rounds_taken"] = 1
    state = federation.client_state(client, 1)
    name = next(name for name in state.tensors if name.startswith("model/target."))
    broken = Message({k: v for k, v in state.tensors.items() if k != name}, state.numbers)
    with pytest.raises(UserError, match=rf"state of client 0 lacks {name.removeprefix('model/')}"):
        federation.client(0, broken)
    other = Message(state.tensors | {"model/target.unknown": torch.ones(1)}, state.numbers)
    with pytest.raises(UserError, match=r"holds target\.unknown"):
        federation.client(0, other)
    smaller = Message(state.tensors | {name: torch.ones(1, 1, 1, 1, 1)}, state.numbers)
    with pytest.raises(UserError, match="does not fit its model"):
        federation.client(0, smaller)
