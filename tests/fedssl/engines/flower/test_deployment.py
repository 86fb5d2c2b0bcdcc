"""SuperLink and three SuperNodes on loopback, with TLS and authentication: the same result, and faults survived."""

from __future__ import annotations

import csv
import os
import re
import shutil
import socket
import ssl
import subprocess
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from fedssl.engines import in_process
from fedssl.engines.in_process import LocalClients
from fedssl.engines.observers import Observer
from fedssl.engines.rounds import run_rounds
from fedssl.federation import build_federation
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate, totals
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.engines.flower.deployment import (
    MARK,
    PATIENCE,
    free_port,
    kill_marked,
    make_authority,
    marked,
    missing_tools,
    poll,
    with_package,
)
from tests.fedssl.engines.flower.flower_command import GONE_SECONDS
from tests.fedssl.engines.flower.loop_grid import assert_close
from tests.fedssl.engines.short_runs import metric

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

# large layers and many public images, so that what Flower adds to each tensor is little beside it
KINDS = {
    "hetero_ssfl": METHODS["hetero_ssfl"]
    | {"objective": {"name": "byol", "hidden_features": 32, "output_features": 256}, "public": 600},
    "lw_fedssl": METHODS["lw_fedssl"]
    | {
        "objective": {"name": "moco_v3", "hidden_features": 768, "output_features": 256},
        "architectures": ["small_convnet_wide"],
    },
}
EQUAL = AVERAGED | {"partition": {"name": "iid", "clients": 3}, "rounds": 1}  # as privacy counts the clients
WAITS = {"round_seconds": PATIENCE, "connect_seconds": PATIENCE}


@dataclass
class Runs:
    """The runs of all kinds, made at the same time, beside one that fails; and the bytes of them all at the socket."""

    ids: dict[str, str]
    failed: str
    bytes: int


@pytest.fixture(scope="module")
def runs(deployment, noisy) -> Runs:
    before = deployment.proxy.bytes
    spoiled = noisy(**METHODS["hetero_ssfl"], seed=1, guard={"minimum_answers": 3}, engine="flower", flower=WAITS)
    deployment.break_round(spoiled, 1, 1, "nan")
    failed = deployment.submit(spoiled, deployment.folder / "spoiled")
    ids = {}
    for kind, method in KINDS.items():
        ids[kind] = deployment.submit(noisy(**method, engine="flower", flower=WAITS), deployment.folder / kind)
    for run in (failed, *ids.values()):
        deployment.finish(run)
    return Runs(ids, failed, deployment.proxy.bytes - before)


@pytest.mark.parametrize("kind", KINDS)
def test_across_machines_the_run_is_the_one_in_this_process_bit_for_bit(kind, deployment, runs, finished, noisy):
    assert deployment.look(runs.ids[kind])["status"] == "finished:completed", deployment.logs()
    here, there = finished(noisy(**KINDS[kind])), deployment.folder / kind
    last = RunDirectory.open(here).checkpoint.round
    for name in ("metrics.csv", "spectrum.csv", f"checkpoints/server.round-{last:05d}.safetensors"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name


def test_the_bytes_on_the_wire_are_those_that_were_predicted(deployment, runs, noisy):
    """Those of each kind by Flower's own count, and those of all at the socket, with TLS, HTTP and all messages."""
    predicted = {}
    for kind, method in KINDS.items():
        cost = totals(estimate(build_federation(noisy(**method))))
        traffic = deployment.look(runs.ids[kind])["network-traffic"]
        predicted[kind] = cost["bytes_up"] + cost["bytes_down"]
        print(f"{kind}: Flower's count / predicted: {traffic['total-bytes'] / predicted[kind]:.4f}")
        assert traffic["inbound-bytes"] == pytest.approx(cost["bytes_up"], rel=0.03), kind
        assert traffic["outbound-bytes"] == pytest.approx(cost["bytes_down"], rel=0.03), kind
    rest = deployment.look(runs.failed)["network-traffic"]["total-bytes"]
    print(f"all: bytes at the socket / predicted: {(runs.bytes - rest) / sum(predicted.values()):.4f}")
    assert runs.bytes - rest == pytest.approx(sum(predicted.values()), rel=0.03)


def test_under_the_minimum_a_run_fails_clearly_and_keeps_what_was_committed(deployment, runs):
    listed = deployment.look(runs.failed)
    assert listed["status"] == "finished:failed"
    print(listed["status-details"])
    assert "guard.minimum_answers is 3" in listed["status-details"]
    assert deployment.committed(deployment.folder / "spoiled") == 0


@pytest.fixture(scope="module")
def private(deployment, runs, noisy) -> Path:
    """The folder of a run with secure aggregation and clipping."""
    options = {
        "secure_aggregation": {"name": "secagg_plus"},
        "differential_privacy": {"name": "fixed_clipping", "clipping_norm": 1e9, "noise_multiplier": 0},
    }
    output = deployment.folder / "private"
    run = deployment.submit(noisy(**EQUAL, engine="flower", flower=WAITS | options), output)
    assert deployment.finish(run) == "finished:completed", deployment.logs()
    return output


def test_with_secure_aggregation_and_clipping_the_mean_is_the_same(private, finished, noisy):
    """A client's keys outlive its process."""
    assert_close(finished(noisy(**EQUAL)), private, atol=1e-5)


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
    progress = Observer()
    run_rounds(federation, directory, progress, Dropping(federation, directory, progress, dropped=dropped))


def deadline(private: Path) -> int:
    """Seconds for a round, which the hanging site costs in full.

    Twice as long as a round took whose sites were asked four times one after another, where they will be asked once.
    """
    with open(private / "timings.csv") as file:
        return max(20, round(2 * max(float(row["seconds"]) for row in csv.DictReader(file))))


def test_faults(deployment, private, noisy, tmp_path):
    """One run of four rounds, in which everything goes wrong.

    round 1: site 1 sends weights that would spoil the mean
    round 2: site 1 says that it has a trillion images, site 2 sends a wrong shape: all are refused by name
    round 3: site 1 is killed while it trains, site 2 hangs: both are dropped at the deadline
    round 4: the SuperLink is killed and started again, site 1 too; the run is started again and continues
    meanwhile a node with an unknown key and one that trusts another authority try to get in
    """
    seconds = deadline(private)
    print(f"the round's deadline: {seconds} s")
    recipe = noisy(**AVERAGED, rounds=4, engine="flower", flower=WAITS | {"round_seconds": seconds})
    deployment.break_round(recipe, 1, 1, "weights")
    deployment.break_round(recipe, 1, 2, "samples")
    deployment.break_round(recipe, 2, 2, "shape")
    faults = [deployment.break_round(recipe, k, 3, "hang") for k in (1, 2)]
    output = deployment.folder / "run"
    first = deployment.submit(recipe, output)
    deployment.wait_for(lambda: not any(file.exists() for file in faults), "sites 1 and 2 hang in round 3")
    deployment.kill("site1")
    killed = time.monotonic()
    make_authority(tmp_path)
    deployment.register("misled")
    deployment.start_node(0, "unknown")
    deployment.start_node(0, "misled", authority=tmp_path / "ca.crt")
    deployment.wait_for(lambda: deployment.committed(output) >= 3, "round 3 is committed without them")
    deployment.kill("superlink")
    assert deployment.committed(output) == 3
    kept = (output / "metrics.csv").read_bytes()[: RunDirectory.open(output).checkpoint.lengths["metrics.csv"]]

    deployment.start_superlink()
    again = deployment.submit(recipe, output)
    # until then it lets nobody in with the killed site's key
    deployment.wait_for(lambda: time.monotonic() > killed + GONE_SECONDS + 2, "Flower takes the site for gone")
    deployment.start_node(1)
    assert deployment.finish(again) == "finished:completed", deployment.logs()
    assert deployment.look(first)["status"] != "finished:completed"
    assert (output / "metrics.csv").read_bytes().startswith(kept)

    with open(output / "refused.csv") as file:
        lost = {(int(row["round"]), int(row["client"])): row["reason"] for row in csv.DictReader(file)}
    assert list(lost) == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)], f"{lost}\n{deployment.logs()}"
    name = next(iter(build_federation(recipe).method.initial_state().tensors))
    assert " holds 9e+05 in magnitude, far above the round's median: expected at most 1e+03" in lost[1, 1]
    assert lost[2, 1].startswith("samples is 1e+12, more than twice ")
    assert lost[2, 2].startswith(f"{name} has shape ")
    # whichever comes first: the deadline at the server or the SuperLink, or the time after which Flower takes a
    # silent node for gone
    late = {f"no answer within {seconds} s", "no answer in time"}
    assert lost[3, 1] in late | {"its node is no longer connected"}
    assert lost[3, 2] in late
    replay(noisy(**AVERAGED, rounds=4), tmp_path / "replayed", {1: {1}, 2: {1, 2}, 3: {1, 2}})
    state = "checkpoints/server.round-00004.safetensors"
    assert (output / state).read_bytes() == (tmp_path / "replayed" / state).read_bytes()

    for intruder in ("unknown", "misled"):
        deployment.wait_for(lambda name=intruder: deployment.has_ended(name), f"{intruder} has given up")
        log = deployment.log(intruder).read_text(errors="replace")
        assert "SuperNode ID" not in log, log
        assert "Exit Code: 305" in log, log
    assert "CERTIFICATE_VERIFY_FAILED" in deployment.log("misled").read_text(errors="replace")


# A hostile site


#: by round, what the hostile site makes of its answer, and why it is left out, if it is: an evaluation counts by itself
ATTACKS: dict[int, tuple[str, str | None]] = {
    0: ("rows", "representation.1 has shape [5, 16], expected [30, any]"),
    1: ("records", " pieces, more than 1000, the most that the SuperLink takes"),
    2: ("pieces", "its answer is larger than "),
    3: ("measures", None),
}


def test_the_honest_sites_end_with_their_result(deployment, noisy, tmp_path):
    """The run is that of the honest sites, as if the hostile one had not answered."""
    method = METHODS["hetero_ssfl"] | {"rounds": 3, "seed": 10}
    attacked = noisy(**method, engine="flower", flower={"round_seconds": PATIENCE, "connect_seconds": PATIENCE})
    for number, (fault, _) in ATTACKS.items():
        deployment.break_round(attacked, 1, number, fault)
    output = deployment.folder / "attacked"
    assert deployment.finish(deployment.submit(attacked, output)) == "finished:completed", deployment.logs()
    assert not list(deployment.faults.iterdir())
    with open(output / "refused.csv") as file:
        refused = {(row["client"], int(row["round"])): row["reason"] for row in csv.DictReader(file)}
    left_out = {("1", number): reason for number, (_, reason) in ATTACKS.items() if reason}
    assert refused.keys() == left_out.keys(), refused
    assert all(reason in refused[place] for place, reason in left_out.items()), refused
    assert metric(output, "knn", 3).keys() == {"0", "2", "mean"}
    replay(noisy(**method), tmp_path / "replayed", {number: {1} for _, number in left_out})
    state = "checkpoints/server.round-00003.safetensors"
    assert (output / state).read_bytes() == (tmp_path / "replayed" / state).read_bytes()


def post(port: int, path: str, size: int) -> int:
    """The status with which a request of `size` bytes is answered; the body is sent until the other end closes."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/protobuf\r\n"
        connection.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode())
        with suppress(OSError):
            for _ in range(size // 2**20):
                connection.sendall(bytes(2**20))
        with suppress(OSError):
            return int(connection.recv(2**16).split()[1])
        return 0  # closed before the answer could be read


@pytest.mark.parametrize("place", ["reverse proxy", "port"])
def test_who_has_no_key_fills_no_memory(place, deployment):
    """64 MiB to the sites' interface: refused by the reverse proxy, and by the SuperLink itself where there is none."""
    if place == "reverse proxy" and deployment.reverse_proxy is None:
        pytest.skip("nginx is not installed")
    port = deployment.reverse_proxy if place == "reverse proxy" else deployment.port
    before = deployment.memory("superlink")
    statuses = [post(port, "/v1/fleet/push-object", 2**26) for _ in range(5)]
    assert set(statuses) <= {413, 0}, statuses
    assert deployment.memory("superlink") - before < 2**25


# docs/deploy.md, from nothing to a run of two sites


PAGE = Path(__file__).parents[4] / "docs" / "deploy.md"
SCRIPTS = sysconfig.get_path("scripts")


def commands() -> list[str]:
    """The indented lines of the section, but for the installation."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith("From nothing to a run of two sites")]
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert lines[0].startswith("pip install")
    return lines[1:]


@pytest.mark.nightly  # what the commands do is tested above
@pytest.mark.skipif(shutil.which("fedssl", path=SCRIPTS) is None, reason="fedssl is not installed: pip install .")
@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here")
def test_every_command_of_the_page_works_as_written(tmp_path):
    """One after another in one shell; `flwr list` is repeated until the run has finished."""
    script, port = ["set -e"], str(free_port())
    for line in commands():
        command = line.replace("8000", port)
        if command.startswith("flwr list"):
            command = f"until {command} > list.txt && grep finished list.txt; do sleep 1; done"
        script.append(command)
    script.append("kill $(jobs -p); wait || true")
    (tmp_path / "home").mkdir()
    home = {"HOME": str(tmp_path / "home"), "FLWR_HOME": str(tmp_path / "home" / ".flwr"), "COLUMNS": "200"}
    path = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", MARK: f"{tmp_path}/", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["bash", "--norc", "-x", "-c", "\n".join(script)],
            cwd=tmp_path,
            env=with_package() | home | path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout
        assert "finished:completed" in " ".join(done.stdout.split()), done.stdout
        [run] = (tmp_path / "runs").iterdir()
        assert RunDirectory.open(run).checkpoint.finished
        assert {row[0] for row in RunDirectory.open(run).read_metrics()} == {0, 1, 2}
        assert (run / "report.html").stat().st_size > 10_000
        assert len(list(tmp_path.glob("state-*/*/client-*"))) >= 2
        poll(lambda: marked(f"{tmp_path}/") == [], "nothing is left")
    finally:
        kill_marked(f"{tmp_path}/")
