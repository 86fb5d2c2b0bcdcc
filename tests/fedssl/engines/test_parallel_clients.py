"""Several clients at a time give the run of one after another, bit for bit."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
from typing import Any

import pytest
import torch

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2, LW_FEDSSL
from tests.fedssl.engines.short_runs import Stopped, StopsInRoundTwo, results

ORCHESTRA: dict[str, Any] = {
    "objective": {"name": "orchestra", "clusters": 8, "memory": 16, "features": 8},
    "aggregators": ["weighted_mean", {"name": "orchestra_clusters", "local_clusters": 4, "steps": 2}],
    "local_update": "replace",
}
METHODS: dict[str, dict[str, Any]] = {
    "fedbyol": AVERAGED,
    "hetero_ssfl": ALIGNED,
    "fedu2": FEDU2 | {"client_states": "memory"},
    "lw_fedssl": LW_FEDSSL,
    "orchestra": ORCHESTRA,
    "bfloat16": AVERAGED | {"training": {"local_epochs": 1, "batch_size": 8, "precision": "bfloat16"}},
}
#: three of four clients a round on two workers: a worker gets clients that it has not had before
FEW: dict[str, Any] = {
    "partition": {"name": "iid", "clients": 4},
    "clients_per_round": 3,
    "evaluation": {"neighbors": 3, "linear": {"epochs": 1}},
}


@pytest.mark.parametrize("method", METHODS)
def test_two_clients_at_a_time_give_the_same_run(method, finished, noisy, tmp_path):
    run(noisy(**FEW | METHODS[method], clients_parallel=2), tmp_path / "two")
    assert results(tmp_path / "two") == results(finished(noisy(**FEW | METHODS[method])))
    assert multiprocessing.active_children() == []


def test_workers_that_are_spawned_give_the_same_run(finished, noisy, tmp_path, monkeypatch):
    """As on macOS and Windows, which have no server to fork from: each worker imports everything itself."""
    methods = []

    def only_spawn() -> list[str]:
        methods.append("spawn")
        return ["spawn"]

    monkeypatch.setattr(multiprocessing, "get_all_start_methods", only_spawn)
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: pytest.fail("the fork server is used"))
    run(noisy(**FEW | ALIGNED, clients_parallel=2), tmp_path / "spawned")
    assert methods
    assert results(tmp_path / "spawned") == results(finished(noisy(**FEW | ALIGNED)))
    assert multiprocessing.active_children() == []


def test_the_order_in_which_clients_are_ready_leaves_no_trace_in_the_folder(tmp_path):
    manifests = []
    for order in ([1, 2, 0], [2, 0, 1]):
        directory = RunDirectory.create(tmp_path / str(order[0]), {"recipe.yaml": "{}"})
        for k in order:
            directory.write_client(k, 1, Message({"a": torch.ones(k + 1)}))
        directory.commit(1, Message(), finished=False)
        manifests.append((directory.checkpoints / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


class CountsWorkers(Observer):
    """How many worker processes there are when clients begin."""

    def __init__(self) -> None:
        self.counts: set[int] = set()

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        self.counts.add(len(multiprocessing.active_children()))


@pytest.mark.parametrize(
    ("before", "after", "workers", "method"),
    [(2, 1, {0}, "fedbyol"), (1, 2, {2}, "bfloat16"), (2, None, {2}, "fedbyol")],
)
def test_a_run_resumes_with_other_clients_at_a_time(before, after, workers, method, finished, noisy, tmp_path):
    with pytest.raises(Stopped):
        run(noisy(**FEW | METHODS[method], clients_parallel=before), tmp_path / "a", StopsInRoundTwo(0))
    recipe, progress = (tmp_path / "a/recipe.yaml").read_bytes(), CountsWorkers()
    resume(tmp_path / "a", progress, clients_parallel=after)
    assert progress.counts == workers
    assert results(tmp_path / "a") == results(finished(noisy(**FEW | METHODS[method])))
    assert (tmp_path / "a/recipe.yaml").read_bytes() == recipe


def test_clients_parallel_is_the_in_process_engines(noisy):
    recipe = noisy(**AVERAGED, clients_parallel=2, engine="flower-simulation")
    with pytest.raises(UserError, match="clients_parallel=2 is for engine in-process, got engine flower-simulation"):
        build_federation(recipe)
