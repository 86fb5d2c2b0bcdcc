"""A step must not wait for its device: no value is read back, and no shape depends on values."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fedssl.federation import build_federation
from fedssl.messages import Message
from tests.fedssl.conftest import ALIGNED, AVERAGED

#: operations for which the host waits for a GPU
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique")
TERMS = ["uniformity", "sliced_uniformity", "decorrelation", "relational_distillation", "global_distillation"]
METHODS: dict[str, dict[str, Any]] = {
    "fedbyol": AVERAGED,
    **{term: AVERAGED | {"regularizers": [{"name": term}]} for term in [*TERMS, "proximal"]},
    "fedsimclr": AVERAGED | {"objective": {"name": "simclr", "hidden_features": 32, "output_features": 16}},
    "fedmoco_v3": AVERAGED | {"objective": {"name": "moco_v3", "hidden_features": 32, "output_features": 16}},
    "hetero_ssfl": ALIGNED,
}


class Waits(TorchDispatchMode):
    """Counts the operations for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(WAITING):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_an_epoch_of_steps_does_not_wait(method, tiny):
    federation = build_federation(tiny(**METHODS[method]))
    part, client = federation.method, federation.client(0, Message())
    server = part.initial_state()
    if part.opening_round:
        server = part.aggregate(server, {0: part.client_round(client, Message(), 0)}, 0)
    local = part._local_round(client, part.broadcast(server, [0], 1)[0], 1)
    part.local_update.receive(local)
    part.schedule.prepare(client.model, part.plan(client.model, 1))
    with Waits() as waits:
        part._train_client(local, None)
    assert waits.names == []
    assert local.logged()["loss"] > 0
