"""Clients' states: where they live, that memory does not grow with the clients, and that they hold what is needed."""

import dataclasses
import gc
import re
from typing import Any

import pytest
import torch

from fedssl import method
from fedssl.aggregators.weighted_mean import WeightedMean
from fedssl.engines import rounds
from fedssl.engines.in_process import run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.local_updates.replace import Replace
from fedssl.messages import Message
from fedssl.models.model import Model
from fedssl.schedules.end_to_end import EndToEnd
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2, LW_FEDSSL
from tests.fedssl.killed_runs import contents


class Gauge(Observer):
    """Counts what is alive when the first and the last client are about to begin: models, and bytes of tensors."""

    def __init__(self) -> None:
        self.models: list[int] = []
        self.tensor_bytes: list[int] = []

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if position in (0, clients - 1):
            gc.collect()
            alive = gc.get_objects()
            self.models.append(sum(type(thing) is Model for thing in alive))
            storages = {thing.data_ptr(): thing.untyped_storage().nbytes() for thing in alive if holds_data(thing)}
            self.tensor_bytes.append(sum(storages.values()))


def holds_data(thing: object) -> bool:
    """Not so what torch.compile and torch.func keep of tests before: fake tensors, and wrappers of other tensors."""
    if type(thing) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(thing):
        return False
    return thing.device.type == "cpu" and thing.layout == torch.strided


def test_memory_does_not_grow_with_the_clients(tiny, tmp_path, monkeypatch):
    """All clients take part in one round, each leaves a state. Bounds are in states, from first client to last."""
    clients = 60
    # what takes the time, and keeps nothing
    monkeypatch.setattr(rounds, "_evaluate", lambda *arguments: [])
    monkeypatch.setattr(method, "train_locally", lambda *arguments: None)
    data = {"name": "digits", "train_limit": 540, "test_limit": 60}
    recipe = tiny(data=data, partition={"name": "iid", "clients": clients}, rounds=1, checkpoints=1)
    seen = Gauge()
    directory = run(recipe, tmp_path / "run", seen)
    assert len(contents(directory.path)) == clients + 2
    assert seen.models[1] - seen.models[0] <= 1  # that of the client before, which the next one replaces
    state = directory.client_state(0).num_bytes
    assert -state <= seen.tensor_bytes[1] - seen.tensor_bytes[0] < 2 * state


# What is stored of a client between its rounds


SIMCLR: dict[str, Any] = {"name": "simclr", "hidden_features": 32, "output_features": 16}
DINO: dict[str, Any] = {"name": "dino", "hidden_features": 16, "output_features": 8, "prototypes": 12, "local_views": 0}
CONTRAST: dict[str, Any] = {"regularizers": ["representation_alignment"]}
#: changes of the tiny recipe, and the networks that are stored
STORED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fedbyol": (AVERAGED, {"target"}),
    "fedsimclr": (AVERAGED | {"objective": SIMCLR}, set()),
    "fedema": (AVERAGED | {"local_update": "fedema"}, {"online", "target"}),
    "moon": (AVERAGED | CONTRAST, {"online", "target"}),
    "personal": (AVERAGED | {"local_update": "personal"}, {"online", "target"}),
    "feddino": (AVERAGED | {"objective": DINO}, {"target", "centre"}),
    "hetero_ssfl": (ALIGNED | {"architectures": ["small_convnet"]}, {"online", "target"}),
    "fedu2": (FEDU2, {"target"}),
    "lw_fedssl": (LW_FEDSSL, {"online"}),  # two rounds
}


@pytest.mark.parametrize("method", STORED)
def test_a_state_holds_what_the_next_round_needs(method, tiny):
    changes, networks = STORED[method]
    federation = build_federation(tiny(**changes))
    client = federation.client(0, Message())
    stored = {name.split(".")[0] for name in federation.client_state(client, 1).tensors if name.startswith("model/")}
    assert stored == {f"model/{network}" for network in networks}
    whole = {f"model/{name}" for name in client.model.state_dict()}
    assert set(federation.client_state(client, 2).tensors) == whole  # for reports of local models


@pytest.mark.parametrize(
    ("kind", "part", "changed"),
    [
        ("schedule", EndToEnd, "travelling"),
        ("aggregators", WeightedMean, "broadcast"),
        ("local_update", Replace, "receive"),
    ],
)
def test_a_part_of_ones_own_may_leave_some_weights_to_each_client(kind, part, changed, tiny):
    own, method = type("Own", (part,), {changed: lambda *_: []})(), build_federation(tiny(**AVERAGED)).method
    method = dataclasses.replace(method, **{kind: (own,) if kind == "aggregators" else own})
    assert method.kept_entries(method.global_model) == list(method.global_model.state_dict())


def test_a_state_without_what_is_needed_is_refused(tiny):
    federation = build_federation(tiny(**AVERAGED))
    client = federation.client(0, Message())
    client.memory.numbers["rounds_taken"] = 1
    state = federation.client_state(client, 1)
    name = next(name for name in state.tensors if name.startswith("model/target."))
    for changed, refusal in (
        ({k: v for k, v in state.tensors.items() if k != name}, f"state of client 0 lacks {name[len('model/') :]}"),
        (state.tensors | {"model/target.unknown": torch.ones(1)}, "holds target.unknown"),
        (state.tensors | {name: torch.ones(1, 1, 1, 1, 1)}, "does not fit its model"),
    ):
        with pytest.raises(UserError, match=re.escape(refusal)):
            federation.client(0, Message(changed, state.numbers))
