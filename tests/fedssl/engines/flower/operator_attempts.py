"""What a site could try at the operator's interfaces with its own registered key, and where it gets with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import (
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

#: the six things that an operator does, by name: each takes Flower's client, a run, a node and a public key
ATTEMPTS: dict[str, Callable[[ControlHttpClient, int, int, bytes], object]] = {
    "start a run": lambda client, run, node, key: client.StartRun(StartRunRequest(fab=Fab(hash_str="0", content=b"0"))),
    "register a key": lambda client, run, node, key: client.RegisterNode(RegisterNodeRequest(public_key=key, name="x")),
    "unregister a key": lambda client, run, node, key: client.UnregisterNode(UnregisterNodeRequest(node_id=node)),
    "list the runs": lambda client, run, node, key: client.ListRuns(ListRunsRequest()),
    "stop a run": lambda client, run, node, key: client.StopRun(StopRunRequest(run_id=run)),
    "read a run's log": lambda client, run, node, key: list(client.StreamLogs(StreamLogsRequest(run_id=run))),
}


class SiteAttempts:
    """A site that signs requests with its key, as its SuperNode does, and sends them wherever it likes."""

    def __init__(self, address: str, certificate: Path, private_key: Path):
        """Reach the server at `address` (host:port) with the authority's certificate and the site's private key."""
        key = load_ssh_private_key(private_key.read_bytes(), password=None)
        self._address, self._certificate = address, str(certificate)
        self._interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),  # type: ignore[arg-type]
        ]

    def at_the_operators_interface(self, run: int, node: int, new_key: bytes) -> dict[str, int]:
        """The HTTP status of each attempt by its name; 200 where it got through."""
        statuses = {}
        with ControlHttpClient.from_server_address(
            self._address, False, self._certificate, interceptors=self._interceptors
        ) as client:
            for name, attempt in ATTEMPTS.items():
                statuses[name] = _status(lambda attempt=attempt: attempt(client, run, node, new_key))
        return statuses

    def at_its_own_interface(self, run: int, node: int) -> int:
        """The HTTP status of a request that a site may make in the name of its node: to describe a run."""
        with FleetHttpClient.from_server_address(
            self._address, False, self._certificate, interceptors=self._interceptors
        ) as client:
            return _status(lambda: client.GetRun(GetRunRequest(node=Node(node_id=node), run_id=run)))

    def post(self, path: str) -> int:
        """The HTTP status of an empty request to a path, which is sent as it stands."""
        with httpx.Client(verify=self._certificate) as client:
            url = httpx.URL(f"https://{self._address}").copy_with(raw_path=path.encode())
            return client.post(url).status_code


def _status(call: Callable[[], object]) -> int:
    try:
        call()
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200
