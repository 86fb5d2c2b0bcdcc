"""What is stored of a client between its rounds: what the next round needs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL

SIMCLR: dict[str, Any] = {"name": "simclr", "hidden_features": 32, "output_features": 16}
CONTRAST: dict[str, Any] = {"regularizers": ["representation_alignment"]}
#: changes of the tiny recipe, and the networks that are stored
METHODS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "fedbyol": (AVERAGED, {"target"}),
    "fedsimclr": (AVERAGED | {"objective": SIMCLR}, set()),
    "fedema": (AVERAGED | {"local_update": "fedema"}, {"online", "target"}),
    "moon": (AVERAGED | CONTRAST, {"online", "target"}),
    "personal": (AVERAGED | {"local_update": "personal"}, {"online", "target"}),
    "hetero_ssfl": (ALIGNED, {"online", "target"}),
    "lw_fedssl": (LW_FEDSSL, {"online"}),  # two rounds
}


@pytest.mark.parametrize("method", METHODS)
def test_a_state_holds_what_the_next_round_needs(method, tiny, tmp_path):
    changes, networks = METHODS[method]
    federation = build_federation(tiny(**changes))
    client = federation.client(0, Message())
    stored = {name.split(".")[0] for name in federation.client_state(client, 1).tensors if name.startswith("model/")}
    assert stored == {f"model/{network}" for network in networks}
    whole = {f"model/{name}" for name in client.model.state_dict()}
    assert set(federation.client_state(client, 2).tensors) == whole  # for reports of local models


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_missing(method, place, tiny, tmp_path, monkeypatch):
    """Metrics and the server's state are those of a run that stores whole models and builds each one anew.

    Two of three clients take part in a round, so that models are reused and clients return.
    """
    changes = METHODS[method][0] | {"clients_per_round": 2, "client_states": place}
    if method != "lw_fedssl":
        changes["rounds"] = 4
    if method == "hetero_ssfl":
        changes["architectures"] = ["small_convnet"]
    run(tiny(**changes), tmp_path / "kept")
    monkeypatch.setattr(Method, "starts_from_server", False)
    monkeypatch.setattr(Method, "kept_entries", lambda self, model: list(model.state_dict()))
    load = Federation.client
    monkeypatch.setattr(Federation, "client", lambda self, index, state, reused=None: load(self, index, state))
    run(tiny(**changes), tmp_path / "whole")
    kept, whole = (tmp_path / name for name in ("kept", "whole"))
    assert (kept / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    servers = [RunDirectory.open(path).server_state().tensors for path in (kept, whole)]
    assert servers[0].keys() == servers[1].keys()
    assert all(torch.equal(tensor, servers[1][name]) for name, tensor in servers[0].items())


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
