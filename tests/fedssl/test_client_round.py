"""What a client's round begins with and what it gives away: its target, its previous model, its answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedssl.client import Client
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.regularizers.representation_alignment import RepresentationAlignment
from tests.fedssl.conftest import AVERAGED

BYOL = {"name": "byol", "hidden_features": 16, "output_features": 8}
MOCO_V3 = {"name": "moco_v3", "hidden_features": 16, "output_features": 8}
State = dict[str, Tensor]


def small_federation(tiny: Any, **changes: Any) -> Federation:
    data = {"name": "digits", "train_limit": 60, "test_limit": 20, "public_holdout": 16}
    return build_federation(tiny(**AVERAGED | {"objective": BYOL, "data": data} | changes))


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def target_as_online(state: State) -> State:
    """The target network's entries, under the names that they have in the online one."""
    return {"online." + name[7:]: tensor for name, tensor in state.items() if name.startswith("target.")}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def at_first_step(monkeypatch) -> list[State]:
    """The model's state when each client begins to train."""
    states: list[State] = []
    real = RepresentationAlignment.start_round

    def start_round(part, local):
        states.append(copied(local.client.model.state_dict()))
        states[-1] |= {"previous." + name: tensor.clone() for name, tensor in local.previous.items()}
        return real(part, local)

    monkeypatch.setattr(RepresentationAlignment, "start_round", start_round)
    return states


def first_and_second_round(federation: Federation) -> tuple[Client, State, Message]:
    """Client 0 trains in rounds 1 and 2: the client, its state between them, and what it receives in round 2."""
    method = federation.method
    server = method.initial_state()
    client = federation.client(0, Message())
    assert not same(client.model.online_state(), server.tensors)  # a client does not start from the server's numbers
    reply = method.client_round(client, method.broadcast(server, [0], 1)[0], 1)
    between = copied(client.model.state_dict())
    # as if others had moved the mean
    server = method.aggregate(server, {0: reply}, 1)
    server.tensors = {n: t + 0.01 if t.is_floating_point() else t for n, t in server.tensors.items()}
    received = method.broadcast(server, [0], 2)[0]
    method.client_round(client, received, 2)
    return client, between, received


@pytest.mark.parametrize(
    ("objective", "fresh"), [(BYOL, False), (MOCO_V3, True), (MOCO_V3 | {"fresh_target_each_round": False}, False)]
)
def test_a_target_starts_as_the_first_online_network_and_goes_on_unless_it_is_fresh(
    objective, fresh, tiny, at_first_step
):
    federation = small_federation(tiny, objective=objective, regularizers=["representation_alignment"])
    _, between, received = first_and_second_round(federation)
    first, second = at_first_step
    server = federation.method.initial_state().tensors
    assert same(target_as_online(first), {name: server[name] for name in target_as_online(first)})
    expected = received.tensors if fresh else target_as_online(between)
    assert same(target_as_online(second), {name: expected[name] for name in target_as_online(second)})


def test_the_previous_model_is_the_one_before_the_weights_arrived(tiny, at_first_step):
    federation = small_federation(tiny, regularizers=["representation_alignment"])
    own = federation.client(0, Message()).model.online_state()
    _, between, received = first_and_second_round(federation)
    for state, before in zip(at_first_step, (own, between), strict=True):
        previous = {name[9:]: tensor for name, tensor in state.items() if name.startswith("previous.")}
        assert same(previous, {name: tensor for name, tensor in before.items() if name.startswith("online.")})
    assert not same(previous, received.tensors)


@pytest.mark.parametrize("aggregators", [["weighted_mean"], ["weighted_mean", "representation_mean"]])
def test_an_answer_and_a_state_do_not_change_when_the_client_trains_on(aggregators, tiny):
    federation = small_federation(tiny, aggregators=aggregators)
    method = federation.method
    server, client = method.initial_state(), federation.client(0, Message())
    sent = method.broadcast(server, [0], 1)[0]
    reply, state = method.client_round(client, sent, 1), federation.client_state(client, 1)
    answered, given, kept = copied(reply.tensors), copied(sent.tensors), copied(state.tensors)
    with torch.no_grad():
        for tensor in client.model.state_dict().values():
            tensor.zero_()
    assert same(reply.tensors, answered)
    assert same(state.tensors, kept)
    assert same(sent.tensors, given)  # nor what the server sent, which all clients share
    assert same(method.broadcast(server, [0], 1)[0].tensors, given)
