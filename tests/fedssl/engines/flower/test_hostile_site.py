"""A SuperLink behind its reverse proxy, two honest sites and a hostile one: the honest sites' run has their result."""

from __future__ import annotations

import csv
import socket
import ssl
from contextlib import suppress

import pytest

from tests.fedssl.conftest import METHODS
from tests.fedssl.engines.flower.deployment import PATIENCE, missing_tools
from tests.fedssl.engines.flower.test_deployment import replay
from tests.fedssl.engines.short_runs import metric

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
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


def test_the_reverse_proxy_lets_sites_reach_their_interface_alone(deployment):
    if deployment.reverse_proxy is None:
        pytest.skip("nginx is not installed")
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/x"):
        assert post(deployment.reverse_proxy, path, 0) == 403, path
    assert post(deployment.reverse_proxy, "/v1/fleet/get-run", 0) == 401  # who has no key
    assert post(deployment.port, "/docs", 0) != 403  # on the SuperLink's own machine
