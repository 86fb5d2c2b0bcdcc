"""A method gives the same results on the compiled operators as on their references, but for rounding."""

from __future__ import annotations

import pytest
import torch

from fedkernels.internal import native
from fedssl.engines import in_process
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, METHODS

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
def test_the_results_are_those_of_the_references(kind, tiny, tmp_path, monkeypatch):
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
    in_process.run(recipe, tmp_path / "compiled")
    assert used >= USED[kind]
    used.clear()
    compiled_ones.clear()
    # The same views for both: BatchNorm over 8 tiny images multiplies what rounding makes of them.
    compiled_ones.add("two_views")
    in_process.run(recipe, tmp_path / "references")
    assert used == {"two_views"}

    compiled, references = (RunDirectory.open(tmp_path / name) for name in ("compiled", "references"))
    for here, there in zip(compiled.read_metrics(), references.read_metrics(), strict=True):
        assert here[:3] == there[:3]
        if "loss" in here[2] and (here[0] == 1 or kind not in SENSITIVE):
            assert here[3] == pytest.approx(there[3], rel=1e-4, abs=1e-5), here
    if kind not in SENSITIVE:
        torch.testing.assert_close(
            compiled.server_state().tensors, references.server_state().tensors, rtol=1e-3, atol=1e-4
        )
