"""Runs whose clients are trained by two processes each: the run of one process; and what cannot be shared by two."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedssl import federation
from fedssl.engines import workers
from fedssl.engines.in_process import run
from fedssl.engines.workers import check_devices
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.models.data_parallel import visible_device
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import contents
from tests.fedssl.killed_runs import killed_and_resumed

METHODS: dict[str, dict[str, Any]] = {
    "fedbyol": AVERAGED,
    # Without Adam, which makes full steps of a gradient that is 0 but for rounding, and without MoCo v3, whose
    # rounds enlarge rounding until no digit is left; in float64 models/test_data_parallel.py compares that.
    "lw_fedssl": LW_FEDSSL
    | {
        "objective": {"name": "simclr", "hidden_features": 16, "output_features": 8},
        "training": {"learning_rate": 0.01},
    },
    "centralised": {"local_update": {"name": "keep_own", "keep_optimizer": True}},
    "personal": AVERAGED | {"local_update": "personal", "regularizers": ["distance_to_global"]},
}
TWO_CLIENTS: dict[str, Any] = {
    "partition": {"name": "iid", "clients": 2},
    "evaluation": {"neighbors": 3, "linear": {"epochs": 1}},
}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def recipe_of(noisy):
    """Build the recipe of a method whose clients are trained by so many processes."""

    def build(method: str, processes: int, **changes: Any):
        values = TWO_CLIENTS | METHODS[method] | changes
        training = {"local_epochs": 1, "batch_size": 8} | values.get("training", {})
        return noisy(**values | {"training": training | {"processes": processes}})

    return build


@pytest.mark.parametrize("method", ["lw_fedssl", "centralised", "personal"])
def test_two_processes_a_client_give_the_run_of_one(method, recipe_of, finished, tmp_path):
    """Up to float32's rounding, which the steps of two rounds enlarge."""
    one = RunDirectory.open(finished(recipe_of(method, 1)))
    two = run(recipe_of(method, 2), tmp_path / "two")
    assert multiprocessing.active_children() == []
    states = [(one.server_state(), two.server_state())]
    states += [(one.client_state(k), two.client_state(k)) for k in range(2)]
    compared = 0
    for alone, shared in states:
        assert alone.tensors.keys() == shared.tensors.keys()
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(shared.tensors[name], tensor, atol=2e-3, rtol=2e-3, msg=f"{method}: {name}")
            compared += tensor.numel()
        assert alone.numbers == pytest.approx(shared.numbers, rel=1e-3)
    assert compared > 1000
    expected, got = read_run(one.path).values, read_run(two.path).values
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        if key[2] == "memory":  # of one process
            assert 0 < got[key] < value
        elif key[2] in ("flops", "bytes_up", "bytes_down"):
            assert got[key] == value
        elif "loss" in key[2]:
            assert got[key] == pytest.approx(value, rel=1e-3, abs=1e-3), key


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_a_stopped_run_resumes_bit_identically(precision, recipe_of, tmp_path):
    recipe = recipe_of("centralised", 2, training={"precision": precision})
    run(recipe, tmp_path / "whole")
    assert contents(killed_and_resumed(recipe, tmp_path / "stopped")) == contents(tmp_path / "whole")
    assert multiprocessing.active_children() == []


# What is refused


#: an own part must say itself that it can be shared: this one may compute another loss
OWN_LOSS = "from fedssl.objectives.byol import BYOL\nclass Mine(BYOL):\n    pass\n"
#: its views depend on the batch
OWN_VIEWS = (
    "from typing import ClassVar\nfrom fedssl.augmentations.random_views import RandomViews\n"
    "class Mine(RandomViews):\n    uses_global_generators: ClassVar[bool] = True\n"
)
FEDX = {"name": "fedx", "output_features": 8}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"training": {"batch_size": 9}}, "training.processes=2 does not divide training.batch_size 9"),
    ({"engine": "flower-simulation"}, "is for engine in-process, got engine flower-simulation"),
    ({"clients_parallel": 2}, "does not go with clients_parallel=2: leave one of the two at 1"),
    ({"objective": FEDX}, r"with objective fedx, whose loss .*: use byol, moco_v3, simclr, simsiam, superv.*, or"),
    ({"regularizers": ["proximal", "decorrelation"]}, "with regularizer decorrelation, whose term"),
    ({"objective": OWN_LOSS}, r"with objective .*mine\.py"),
    ({"augmentation": OWN_VIEWS}, r"with augmentation .*mine\.py, whose views"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_be_shared_is_refused(changes, message, recipe_of, tmp_path):
    for kind, text in changes.items():
        if text in (OWN_LOSS, OWN_VIEWS):
            (tmp_path / "mine.py").write_text(text)
            changes = {kind: str(tmp_path / "mine.py")}
    with pytest.raises(UserError, match=message):
        build_federation(recipe_of("fedbyol", 2, **changes))


def test_a_network_that_drops_values_at_random_is_refused(recipe_of, monkeypatch):
    built = federation._build_model

    def with_dropout(*arguments: Any):
        model = built(*arguments)
        model.online["projector"].insert(1, torch.nn.Dropout(0.1))
        return model

    monkeypatch.setattr(federation, "_build_model", with_dropout)
    build_federation(recipe_of("fedbyol", 1))
    with pytest.raises(UserError, match=r"small_convnet, whose online\.projector\.1 \(Dropout\) drops values at"):
        build_federation(recipe_of("fedbyol", 2))


def test_fewer_gpus_than_processes_are_refused_before_anything_is_written(recipe_of, tmp_path, monkeypatch):
    built = build_federation(recipe_of("fedbyol", 4))
    on_cuda = type("Federation", (), {"recipe": built.recipe, "device": torch.device("cuda")})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_devices(on_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    check_devices(built)  # on the CPU
    with pytest.raises(UserError, match=r"training\.processes=4 needs as many CUDA devices, and this torch sees 3"):
        check_devices(on_cuda)
    monkeypatch.setattr(workers.dist, "is_available", lambda: False)
    with pytest.raises(UserError, match="which this one lacks"):
        run(recipe_of("fedbyol", 4), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_each_process_gets_a_gpu_of_its_own():
    assert [visible_device(rank, None) for rank in range(3)] == ["0", "1", "2"]
    assert [visible_device(rank, "4, 6,GPU-a") for rank in range(3)] == ["4", "6", "GPU-a"]
