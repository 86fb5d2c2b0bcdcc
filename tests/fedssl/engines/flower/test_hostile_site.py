"""A SuperLink behind its reverse proxy, two honest sites and a hostile one: the honest sites' run has their result."""

from __future__ import annotations

import csv
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.engines.flower.deployment import PATIENCE, Deployment, missing_tools
from tests.fedssl.engines.flower.test_deployment import replay

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools())),
]
#: each run's method and, by round, what the hostile site makes of its answer
ATTACKS = {
    "aligned": (METHODS["hetero_ssfl"], {0: "rows", 1: "records", 2: "pieces", 3: "measures"}),
    "averaged": (AVERAGED, {1: "weights", 2: "samples"}),
}
REASONS = {
    "rows": "representation.1 has shape [5, 16], expected [30, any]",
    "records": " pieces, more than 1000, the most that the SuperLink takes",
    "pieces": "its answer is larger than ",
    "weights": " holds 9e+05 in magnitude, far above the round's median: expected at most 1e+03",
    "samples": "samples is 1e+12, more than twice ",
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    """A SuperLink and three sites; where nginx is installed, a reverse proxy between them."""
    started = Deployment(tmp_path_factory.mktemp("hostile"), reverse_proxy=shutil.which("nginx") is not None)
    try:
        started.start_superlink()
        started.register("site0", "site1", "site2")
        for k in range(3):
            started.start_node(k)
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("kind", ATTACKS)
def test_the_honest_sites_end_with_their_result(kind, deployment, noisy, tmp_path):
    """The run is that of the honest sites, as if the hostile one had not answered. A later run starts."""
    method, faults = ATTACKS[kind]
    waits = {"round_seconds": PATIENCE, "connect_seconds": PATIENCE}
    attacked = noisy(**method, rounds=3, engine="flower", flower=waits)
    for number, fault in faults.items():
        deployment.break_round(attacked, 1, number, fault)
    output = deployment.folder / kind
    run = deployment.submit(attacked, output)
    assert deployment.finish(run) == "finished:completed", deployment.logs()
    assert not list(deployment.faults.iterdir())
    with open(output / "refused.csv") as file:
        refused = {int(row["round"]): row["reason"] for row in csv.DictReader(file) if row["client"] == "1"}
        file.seek(0)
        assert {row["client"] for row in csv.DictReader(file)} == {"1"}
    left_out = {number: fault for number, fault in faults.items() if fault in REASONS}
    assert refused.keys() == left_out.keys(), refused
    for number, fault in left_out.items():
        assert REASONS[fault] in refused[number]
    with open(output / "metrics.csv") as file:
        evaluated = {row["client"] for row in csv.DictReader(file) if row["round"] == "3" and row["metric"] == "knn"}
    assert evaluated == ({"0", "2", "mean"} if kind == "aligned" else {"global"})
    replay(noisy(**method, rounds=3), tmp_path / "replayed", {number: {1} for number in left_out})
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


@pytest.mark.parametrize(
    "path", ["/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/x"]
)
def test_the_reverse_proxy_lets_sites_reach_their_interface_alone(path, deployment):
    if deployment.reverse_proxy is None:
        pytest.skip("nginx is not installed")
    assert post(deployment.reverse_proxy, path, 0) == 403
    assert post(deployment.reverse_proxy, "/v1/fleet/get-run", 0) == 401  # who has no key
    assert post(deployment.port, "/docs", 0) != 403  # on the SuperLink's own machine
