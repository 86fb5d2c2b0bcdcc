"""Runs whose clients are trained by two processes each: the run of one process; and what cannot be shared by two."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedssl.engines import workers
from fedssl.engines.in_process import resume, run
from fedssl.engines.workers import DataParallelTrainer, check_devices
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.data_parallel import visible_device
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import Stopped, StopsInRoundTwo, contents

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


def metrics_of(path: Path) -> dict[tuple[str, ...], float]:
    lines = [line.split(",") for line in (path / "metrics.csv").read_text().splitlines()[1:]]
    return {tuple(keys): float(value) for *keys, value in lines}


@pytest.mark.parametrize("method", METHODS)
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
    expected, got = metrics_of(one.path), metrics_of(two.path)
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
    with pytest.raises(Stopped):
        run(recipe, tmp_path / "stopped", StopsInRoundTwo())
    assert multiprocessing.active_children() == []
    resume(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


class Worker:
    """A worker whose answer lies in its pipe."""

    def __init__(self, outcome: tuple[str | None, Exception | None], process: Any):
        self.connection, theirs = multiprocessing.Pipe()
        theirs.send(outcome)
        self.process = process

    def give(self, task: Any) -> None:
        pass

    def take(self, client: int) -> tuple[str | None, Exception | None]:
        return self.connection.recv()

    def lost(self, client: int) -> UserError:
        return UserError(f"the worker process of client {client} has ended")


def test_a_process_that_dies_is_named_even_if_another_one_tells_first(recipe_of):
    """The error of the process that lost it is not the cause."""
    ended = multiprocessing.get_context("spawn").Process(target=int)
    ended.start()
    ended.join()
    sentinel, other_end = multiprocessing.Pipe()
    alive = type("Process", (), {"sentinel": sentinel})
    trainer = DataParallelTrainer(build_federation(recipe_of("fedbyol", 2)))
    trainer._workers = [Worker((None, RuntimeError("Connection closed by peer")), alive), Worker(("late", None), ended)]
    with pytest.raises(UserError, match="the worker process of client 5 has ended"):
        trainer.train(5, Message(), Message(), 1)
    trainer._workers = [Worker((None, RuntimeError("client 5: a fault of one's own")), alive)]
    with pytest.raises(RuntimeError, match="client 5: a fault of one's own"):
        trainer.train(5, Message(), Message(), 1)
    other_end.close()


# What is refused


OWN_PARTS = [
    # it derives from an objective that can, and may compute another loss
    ("objective", "from fedssl.objectives.byol import BYOL\nclass Mine(BYOL):\n    pass\n", ""),
    # its views depend on the batch
    (
        "augmentation",
        "from typing import ClassVar\nfrom fedssl.augmentations.random_views import RandomViews\n"
        "class Mine(RandomViews):\n    uses_global_generators: ClassVar[bool] = True\n",
        ", whose views",
    ),
]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "uneven": ({"training": {"batch_size": 9}}, "training.processes=2 does not divide training.batch_size 9"),
    "engine": ({"engine": "flower-simulation"}, "is for engine in-process, got engine flower-simulation"),
    "clients_parallel": ({"clients_parallel": 2}, "does not go with clients_parallel=2: leave one of the two at 1"),
    "fedx": (
        {"objective": {"name": "fedx", "output_features": 8}},
        "does not go with objective fedx, whose loss .*: use byol, moco_v3, simclr, simsiam, supervised, or",
    ),
    "uniformity": ({"regularizers": ["uniformity"]}, "does not go with regularizer uniformity, whose term"),
    "decorrelation": ({"regularizers": ["proximal", "decorrelation"]}, "does not go with regularizer decorrelation"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_refused(what, recipe_of):
    changes, message = REFUSED[what]
    with pytest.raises(UserError, match=message):
        build_federation(recipe_of("fedbyol", 2, **changes))


@pytest.mark.parametrize(("kind", "text", "told"), OWN_PARTS)
def test_an_own_part_must_say_itself_that_it_can_be_shared(kind, text, told, recipe_of, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=rf"does not go with {kind} .*mine\.py{told}"):
        build_federation(recipe_of("fedbyol", 2, **{kind: str(tmp_path / "mine.py")}))


def test_a_network_that_drops_values_at_random_is_refused(recipe_of, monkeypatch):
    from fedssl import federation

    built = federation._build_model

    def with_dropout(*arguments: Any):
        model = built(*arguments)
        model.online["projector"].insert(1, torch.nn.Dropout(0.1))
        return model

    monkeypatch.setattr(federation, "_build_model", with_dropout)
    build_federation(recipe_of("fedbyol", 1))
    with pytest.raises(
        UserError, match=r"small_convnet, whose online\.projector\.1 \(Dropout\) drops values at random"
    ):
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
