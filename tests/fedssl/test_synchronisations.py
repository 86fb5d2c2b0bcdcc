"""A step does not wait for its device, dispatches few operations, and takes the compiled ones."""

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from fedkernels.internal import native
from fedssl import training
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.recipe import Recipe
from tests.fedssl import conftest
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.rounds_in_memory import train_rounds

#: operations for which the host waits for a GPU
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique")
TERMS = ["uniformity", "sliced_uniformity", "decorrelation", "relational_distillation", "global_distillation"]
SIMCLR: dict[str, Any] = AVERAGED | {"objective": {"name": "simclr", "hidden_features": 32, "output_features": 16}}
METHODS: dict[str, dict[str, Any]] = {
    "fedbyol": AVERAGED,
    "terms": AVERAGED | {"regularizers": [*TERMS, "proximal"]},
    "fedsimclr": SIMCLR,
    "fedmoco_v3": AVERAGED | {"objective": {"name": "moco_v3", "hidden_features": 32, "output_features": 16}},
    "hetero_ssfl": ALIGNED,
}


class Operations(TorchDispatchMode):
    """Lists the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations_of_round(recipe: Recipe, most_steps: int | None = None) -> list[str]:
    """What client 0's first round dispatches, at the most so many steps."""
    federation = build_federation(recipe)
    part, client = federation.method, federation.client(0, Message())
    server = part.initial_state()
    if part.opening_round:
        server = part.aggregate(server, {0: part.client_round(client, Message(), 0)}, 0)
    local = part._local_round(client, part.broadcast(server, [0], 1)[0], 1)
    part.local_update.receive(local)
    part.schedule.prepare(client.model, part.plan(client.model, 1))
    with Operations() as operations:
        part._train_client(local, most_steps)
    assert local.logged()["loss"] > 0
    return operations.names


@pytest.mark.parametrize(
    ("method", "precision"), [*((name, "float32") for name in METHODS), ("hetero_ssfl", "bfloat16")]
)
def test_an_epoch_of_steps_does_not_wait(method, precision, tiny):
    recipe = tiny(**METHODS[method], training={"local_epochs": 1, "batch_size": 8, "precision": precision})
    assert [name for name in operations_of_round(recipe) if name.startswith(WAITING)] == []


# Operations of a step of FedBYOL, its views included. Before one operator made the views, and optimisers and target
# networks worked on lists of tensors, they were 885, and the host waited for several of them. Half of them is 442.
@pytest.mark.parametrize(("options", "most"), [({}, 385), ({"precision": "bfloat16"}, 453)])
def test_a_step_dispatches_few_operations(options, most, tiny):
    """Rounds of two and of three steps differ by one step, whatever happens before and after; counting adds some."""
    recipe = tiny(**AVERAGED, training={"local_epochs": 1, "batch_size": 8, **options})
    counts = []
    for steps in (2, 3):
        training.STEP_COSTS.clear()
        counts.append(len(operations_of_round(recipe, steps)))
    assert counts[1] - counts[0] <= most


USED = {
    "hetero_ssfl": {"linear_cka_to_kernel"},
    "fedu2": {"unbalanced_ot", "delta_gram", "client_weights", "apply_deltas"},
    "lw_fedssl": {"info_nce"},
    "simclr": {"nt_xent"},
}


@pytest.mark.skipif(native.module is None, reason="fedkernels is not compiled here")
@pytest.mark.parametrize("kind", USED)
def test_a_round_takes_the_compiled_operators(kind, tiny, monkeypatch):
    """They are held to their references in tests/fedkernels."""
    expected, used, real = {"two_views", *USED[kind]}, set(), native.operator

    def operator(name, *tensors):
        found = real(name, *tensors) if name in expected else None
        used.update([] if found is None else [name])
        return found

    monkeypatch.setattr(native, "operator", operator)
    train_rounds(build_federation(tiny(**(conftest.METHODS | {"simclr": SIMCLR})[kind] | SMALL)), 1)
    assert used == expected
