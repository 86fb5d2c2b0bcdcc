"""A method gives the same results on the compiled operators as on their references, but for rounding."""

from __future__ import annotations

import pytest
import torch

from fedkernels.internal import native
from fedssl.federation import build_federation
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.rounds_in_memory import train_rounds

USED = {
    "hetero_ssfl": {"linear_cka_to_kernel"},
    "fedu2": {"unbalanced_ot", "delta_gram", "client_weights", "apply_deltas"},
    "lw_fedssl": {"info_nce"},
    "simclr": {"nt_xent"},
}
#: by the second round their training has multiplied rounding, and the transport solver's gap, by a thousand
SENSITIVE = ("fedu2", "lw_fedssl", "simclr")
SIMCLR = AVERAGED | {"objective": {"name": "simclr", "hidden_features": 32, "output_features": 16}}

pytestmark = pytest.mark.skipif(native.module is None, reason="fedkernels is not compiled here")


@pytest.mark.parametrize("kind", USED)
def test_the_results_are_those_of_the_references(kind, tiny, monkeypatch):
    used = set()
    real = native.operator
    compiled_ones = {"two_views", *(name for names in USED.values() for name in names)}

    def operator(name, *tensors):
        found = real(name, *tensors) if name in compiled_ones else None
        if found is not None:
            used.add(name)
        return found

    monkeypatch.setattr(native, "operator", operator)
    # SGD, for Adam's first steps go by a gradient's sign, also where it is nothing but rounding
    training = {"local_epochs": 1, "batch_size": 8, "optimizer": "sgd", "learning_rate": 0.001}
    recipe = tiny(**(METHODS | {"simclr": SIMCLR})[kind] | {"training": training})
    compiled = train_rounds(build_federation(recipe), 2)
    assert used >= USED[kind]
    used.clear()
    compiled_ones.clear()
    # The same views for both: BatchNorm over 8 tiny images multiplies what rounding makes of them.
    compiled_ones.add("two_views")
    references = train_rounds(build_federation(recipe), 2)
    assert used == {"two_views"}

    for number in (1,) if kind in SENSITIVE else (1, 2):
        for k, reply in compiled.replies[number].items():
            losses = {name: value for name, value in reply.metrics.items() if "loss" in name}
            expected = {name: references.replies[number][k].metrics[name] for name in losses}
            assert losses == pytest.approx(expected, rel=1e-4, abs=1e-5)
    if kind not in SENSITIVE:
        torch.testing.assert_close(compiled.server.tensors, references.server.tensors, rtol=1e-3, atol=1e-4)
