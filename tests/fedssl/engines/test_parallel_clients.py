"""Several clients at a time give the run of one after another, bit for bit."""

import multiprocessing
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
from tests.fedssl.engines.short_runs import SMALL, results
from tests.fedssl.killed_runs import Killed, KilledIn

#: three of four clients a round on two workers: a worker gets clients that it has not had before
FEW: dict[str, Any] = {
    "partition": {"name": "iid", "clients": 4},
    "clients_per_round": 3,
    "evaluation": SMALL["evaluation"],
}
ROUNDED = FEDU2 | {"training": {"local_epochs": 1, "batch_size": 8, "precision": "bfloat16"}}


@pytest.mark.parametrize("method", [ALIGNED, LW_FEDSSL], ids=["hetero_ssfl", "lw_fedssl"])
def test_two_clients_at_a_time_give_the_same_run(method, finished, noisy, tmp_path):
    run(noisy(**FEW | method, clients_parallel=2), tmp_path / "two")
    assert results(tmp_path / "two") == results(finished(noisy(**FEW | method)))
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


@pytest.mark.parametrize(("before", "after", "count", "method"), [(2, 1, 0, AVERAGED), (1, 2, 2, ROUNDED)])
def test_a_run_resumes_with_other_clients_at_a_time(before, after, count, method, finished, noisy, tmp_path):
    with pytest.raises(Killed):
        run(noisy(**FEW | method, clients_parallel=before), tmp_path / "a", KilledIn(2, 0))
    progress = CountsWorkers()
    resume(tmp_path / "a", progress, overrides=[f"clients_parallel={after}"])
    assert max(progress.counts) == count
    assert results(tmp_path / "a") == results(finished(noisy(**FEW | method)))


def test_clients_parallel_is_the_in_process_engines(noisy):
    recipe = noisy(**AVERAGED, clients_parallel=2, engine="flower-simulation")
    with pytest.raises(UserError, match="clients_parallel=2 is for engine in-process, got engine flower-simulation"):
        build_federation(recipe)
