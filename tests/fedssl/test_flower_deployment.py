"""SuperLink and three SuperNodes on loopback, with TLS and authentication: the same result, and faults survived."""

from __future__ import annotations

import csv
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from fedssl.engines import in_process
from fedssl.engines.in_process import LocalClients, run_rounds
from fedssl.federation import build_federation
from fedssl.recipe import Recipe
from fedssl.run_directory import RunDirectory

from .conftest import ALIGNED, AVERAGED
from .flower_deployment import CountingProxy, Deployment, make_authority, missing_tools
from .test_in_process import metric

pytestmark = [
    pytest.mark.skipif("FEDSSL_TEST_DEADLINE" not in os.environ, reason="for an idle machine: FEDSSL_TEST_DEADLINE=45"),
    pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools())),
]

#: seconds; a round must take less, so a slow or busy machine needs more
DEADLINE = int(os.environ.get("FEDSSL_TEST_DEADLINE", "45"))
WAITS = {"round_seconds": DEADLINE, "connect_seconds": 300}
FEDU2 = {
    "aggregators": ["eua"],
    "regularizers": [{"name": "uniformity", "weight": 0.1, "tau_a": 0.8, "tau_b": 0.8}],
    "local_update": "replace",
    # large layers, so that what Flower adds to each of them is little beside them
    "objective": {"name": "byol", "hidden_features": 2048, "output_features": 256},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The sites compute with one thread; a sum over another number of them rounds differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def deployment(tmp_path):
    started = Deployment(tmp_path)
    try:
        started.start_superlink()
        yield started
    finally:
        started.close()


def assert_same(a: Path, b: Path, rounds: int) -> None:
    """The same server's state, metrics and spectra."""
    for name in ("metrics.csv", "spectrum.csv", f"checkpoints/server.round-{rounds:05d}.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def test_across_machines_the_result_is_the_one_in_this_process(deployment, tiny, tmp_path):
    """Hetero-SSFL and FedU2, two runs one after another at the same sites; and the bytes on the wire."""
    proxy = CountingProxy(deployment.port)
    deployment.register("site0", "site1", "site2")
    for k in range(3):
        deployment.start_node(k, port=proxy.port)
    for name, method in (("aligned", ALIGNED | {"rounds": 2}), ("fedu2", FEDU2 | {"rounds": 1})):
        in_process.run(tiny(**method), tmp_path / f"{name} here")
        waits = {"round_seconds": 250, "connect_seconds": 300}
        run = deployment.submit(tiny(**method, engine="flower", flower=waits), tmp_path / name)
        proxy.bytes = 0
        assert deployment.finish(run, 10 * DEADLINE) == "finished:completed", deployment.logs()
        assert_same(tmp_path / f"{name} here", tmp_path / name, method["rounds"])
    counted = sum(sum(metric(tmp_path / "fedu2", way, 1).values()) for way in ("bytes_up", "bytes_down"))
    assert counted > 40e6
    print(f"bytes on the wire / counted: {proxy.bytes / counted:.4f}")
    assert abs(proxy.bytes / counted - 1) < 0.03
    proxy.close()


#: put in a site's path: its first answer holds NaN or has a wrong shape; and it tells when it trains in round 2
FAULTY = """
import importlib.abc, os, sys, time
from pathlib import Path

def break_method():
    from fedssl.method import Method
    real = Method.client_round

    def client_round(method, client, received, number):
        reply = real(method, client, received, number)
        name = next(iter(reply.tensors))
        if number == 1 and client.index == 1:
            reply.tensors[name][:] = float("nan")
        if number == 1 and client.index == 2:
            reply.tensors[name] = reply.tensors[name][1:]
        if number == 2:
            Path({folder!r}, f"training{{client.index}}").touch()
            time.sleep(600)
        return reply

    Method.client_round = client_round

class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "fedssl.engines.flower":
            sys.meta_path.remove(self)
            break_method()
        return None

sys.meta_path.insert(0, AfterImport())
"""


class Dropping(LocalClients):
    """Clients of this process of which some do not answer some rounds."""

    def __init__(self, *arguments, dropped: dict[int, set[int]]):
        super().__init__(*arguments)
        self.dropped = dropped

    def answers(self, number, sent):
        lost = self.dropped.get(number, set())
        replies, _ = super().answers(number, {k: message for k, message in sent.items() if k not in lost})
        return replies, dict.fromkeys(sorted(lost & sent.keys()), "dropped")


def replay(recipe: Recipe, path: Path, dropped: dict[int, set[int]]) -> None:
    federation = build_federation(recipe)
    directory = RunDirectory.create(path, in_process.first_files(federation))
    run_rounds(
        federation,
        directory,
        in_process.Silent(),
        Dropping(federation, directory, in_process.Silent(), dropped=dropped),
    )


def test_faults(deployment, tiny, tmp_path):
    """One run of four rounds, in which everything goes wrong.

    round 1: site 1 sends NaN, site 2 a wrong shape: both are refused by name
    round 2: site 1 is killed while it trains, site 2 hangs: both are dropped at the deadline
    round 3: the SuperLink is killed and started again; the run is started again and continues
    all the time a node with an unknown key and one that trusts another authority try to get in
    """
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "sitecustomize.py").write_text(FAULTY.format(folder=str(tmp_path)))
    faulty = {"PYTHONPATH": f"{tmp_path / 'faulty'}:{Path(in_process.__file__).parents[2]}"}
    make_authority(tmp_path / "other authority")
    deployment.register("site0", "site1", "site2", "misled")
    deployment.start_node(0)
    for k in (1, 2):
        deployment.start_node(k, environment=faulty)
    deployment.start_node(0, "unknown")
    deployment.start_node(0, "misled", authority=tmp_path / "other authority" / "ca.crt")

    output = tmp_path / "run"
    recipe = tiny(**AVERAGED, rounds=4, engine="flower", flower=WAITS)
    first = deployment.submit(recipe, output)
    for k in (1, 2):
        deployment.wait_for((tmp_path / f"training{k}").exists, f"site {k} trains in round 2", 10 * DEADLINE)
    deployment.kill("site1")
    deployment.signal("site2", signal.SIGSTOP)
    deployment.wait_for(lambda: deployment.committed(output) >= 2, "round 2 is committed without them", 3 * DEADLINE)
    deployment.kill("superlink")
    assert deployment.committed(output) in (2, 3)
    deployment.kill("site2")
    deployment.start_superlink()
    for k in (1, 2):
        deployment.start_node(k)
    again = deployment.submit(recipe, output)
    assert deployment.finish(again, 10 * DEADLINE) == "finished:completed", deployment.logs()
    assert deployment.status(first) != "finished:completed"

    with open(output / "refused.csv") as file:
        lost = [(int(row["round"]), int(row["client"]), row["reason"]) for row in csv.DictReader(file)]
    name = next(iter(build_federation(recipe).method.initial_state().tensors))
    assert lost[:2] == [(1, 1, f"{name} holds NaN"), (1, 2, lost[1][2])]
    assert lost[1][2].startswith(f"{name} has shape ")
    assert [entry[:2] for entry in lost[2:4]] == [(2, 1), (2, 2)]
    # whichever comes first: the deadline, or the minute after which Flower takes a silent node for gone
    assert {reason for *_, reason in lost[2:4]} <= {f"no answer within {DEADLINE} s", "its node has gone"}
    assert all(number == 3 for number, *_ in lost[4:])  # where round 3 was done before the SuperLink was killed
    dropped: dict[int, set[int]] = {}
    for number, k, _ in lost:
        dropped.setdefault(number, set()).add(k)
    replay(tiny(**AVERAGED, rounds=4), tmp_path / "replayed", dropped)
    state = "checkpoints/server.round-00004.safetensors"
    assert (output / state).read_bytes() == (tmp_path / "replayed" / state).read_bytes()

    for intruder in ("unknown", "misled"):
        log = deployment.log(intruder).read_text(errors="replace")
        assert "SuperNode ID" not in log, log
    assert "CERTIFICATE_VERIFY_FAILED" in deployment.log("misled").read_text(errors="replace")
    assert threading.active_count() < 10
