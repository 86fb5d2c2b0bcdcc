"""A consortium of two sites from an empty folder to a finished run, with the start scripts that `provision` writes.

As docs/deploy.md says: the reverse proxy in front of the SuperLink; TLS and registered keys; sites that run approved
apps alone; and a site that is revoked while the server runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.engines.flower.deployment import (
    MARK,
    free_port,
    is_listening,
    kill_marked,
    marked,
    missing_tools,
    poll,
    read_logs,
    run_flwr,
    with_package,
)

#: the digits of scikit-learn, as in docs/deploy.md; few of them
APP = ("hetero_ssfl", "app", "rounds=2", "partition.clients=2", "partition.classes_per_client=5")
APP += ("training.local_epochs=1", "data.train_limit=300", "data.test_limit=60", "data.public_holdout=30")
APP += ("architectures=[small_convnet, small_convnet_wide]", "evaluation.linear.epochs=2")
HAS_NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") is not None

#: the operator's interface, written so that it may look like the sites' to one of the two servers that read it
DISGUISED = (
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "//v1/control/list-runs",
    "/V1/fleet/../control/list-runs",
    "/v1/runtime/acquire-task",
    "/docs",
)

pytestmark = [
    pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools())),
    pytest.mark.skipif(not HAS_NGINX, reason="nginx is not installed: apt-get install nginx-light"),
]


# What a site could try at the operator's interfaces with its own registered key, and where it gets with it

#: things that an operator does, by name: each takes Flower's client and a public key
ATTEMPTS: dict[str, Callable[[ControlHttpClient, bytes], object]] = {
    "start a run": lambda client, key: client.StartRun(StartRunRequest(fab=Fab(hash_str="0", content=b"0"))),
    "register a key": lambda client, key: client.RegisterNode(RegisterNodeRequest(public_key=key, name="x")),
    "list the runs": lambda client, key: client.ListRuns(ListRunsRequest()),
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

    def at_the_operators_interface(self, new_key: bytes) -> dict[str, int]:
        """The HTTP status of each attempt by its name; 200 where it got through."""
        statuses = dict.fromkeys(ATTEMPTS, 200)
        with ControlHttpClient.from_server_address(
            self._address, False, self._certificate, interceptors=self._interceptors
        ) as client:
            for name, attempt in ATTEMPTS.items():
                try:
                    attempt(client, new_key)
                except httpx.HTTPStatusError as error:
                    statuses[name] = error.response.status_code
        return statuses

    def post(self, path: str, size: int = 0) -> int:
        """The HTTP status of an unsigned request of `size` bytes to a path, which is sent as it stands."""
        with httpx.Client(verify=self._certificate) as client:
            url = httpx.URL(f"https://{self._address}").copy_with(raw_path=path.encode())
            try:
                return client.post(url, content=bytes(size)).status_code
            except httpx.TransportError:
                return 413  # the connection was closed before the answer could be read


def end_by_sigterm_with_parent() -> None:
    """As a start script ends what it has started when it is terminated, but not when it is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Members:
    """The coordinator, the server and the sites on one machine; only start scripts call `fedssl` as a process."""

    def __init__(self, folder: Path, fedssl: Callable[..., tuple[int, str, str]]):
        self.folder, self._fedssl = folder, fedssl
        self.consortium = folder / "consortium"
        self.port, self.internal_port = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        command = folder / "bin" / "fedssl"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedssl "$@"\n')
        command.chmod(0o700)
        variables = {"PATH": f"{command.parent}:{os.environ.get('PATH', os.defpath)}", "OMP_NUM_THREADS": "1"}
        self.environment = with_package() | variables | {MARK: f"{folder}/", "FLWR_HOME": str(folder / "home")}

    def fedssl(self, *arguments: str) -> str:
        code, out, err = self._fedssl(*arguments)
        assert code == 0, out + err + self.logs()
        return out

    def start(self, member: str) -> None:
        with open(self.log(member), "ab") as log:
            self.processes[member] = subprocess.Popen(
                ["./start.sh"],
                cwd=self.consortium / member,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_by_sigterm_with_parent,
            )

    def approve(self, site: str, digest: str) -> None:
        path = self.consortium / site / "site.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"approved_apps": [digest]}))

    def flwr(self, *arguments: str) -> dict:
        return run_flwr(self.consortium / "server" / "flower", *arguments)

    def status(self, run: str) -> str:
        return str(self.flwr("list", "consortium", "--run-id", run)["runs"][0]["status"])

    def nodes(self) -> set[int]:
        """The ids of the registered keys' nodes."""
        return {int(node["node-id"]) for node in self.flwr("supernode", "list", "consortium")["nodes"]}

    def wait_for(self, member: str, text: str) -> None:
        """Wait until a member has printed a text."""

        def has_printed() -> bool:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, f"{ended} ended before {member} printed {text!r}\n{self.logs()}"
            return text in self.log(member).read_text(errors="replace")

        poll(has_printed, f"{member} prints {text!r}")

    def log(self, member: str) -> Path:
        return self.folder / f"{member}.log"

    def logs(self) -> str:
        return read_logs(self.folder)

    def stop(self) -> None:
        """As Ctrl-C or systemd stops the start scripts."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.processes.values():
            process.wait()
        self.processes.clear()


@pytest.fixture
def members(tmp_path, fedssl) -> Iterator[Members]:
    made = Members(tmp_path, fedssl)
    yield made
    made.stop()
    kill_marked(f"{tmp_path}/")


def require_reverse_proxy(members: Members, run: str) -> None:
    """A site's key opens none of the operator's interfaces, not even when nginx has been killed and starts again.

    The same requests are answered at the SuperLink's own port, which listens on this machine alone.
    """
    consortium = members.consortium
    files = (consortium / "hospital-a" / "ca.crt", consortium / "hospital-a" / "site.key")
    nodes = members.nodes()
    new_key = public_key_to_bytes(generate_key_pairs()[1])
    site = SiteAttempts(f"localhost:{members.port}", *files)

    def require_refusals() -> None:
        statuses = site.at_the_operators_interface(new_key)
        assert statuses == dict.fromkeys(ATTEMPTS, 403), statuses
        assert {site.post(path) for path in DISGUISED} == {403}
        assert site.post("/v1/fleet/push-object", 2**25) == 413
        assert members.nodes() == nodes
        assert members.status(run) == "running"

    require_refusals()
    os.kill(int((consortium / "server" / "nginx.pid").read_text()), signal.SIGKILL)
    members.wait_for("server", "the reverse proxy (nginx) has ended and is started again")
    poll(lambda: is_listening(members.port), "the reverse proxy listens again")
    require_refusals()
    assert listening_addresses(members.internal_port) == {"0100007F"}  # 127.0.0.1
    behind = SiteAttempts(f"localhost:{members.internal_port}", *files)
    assert behind.at_the_operators_interface(b"")["list the runs"] == 200
    assert {behind.post(path) for path in DISGUISED} != {403}
    assert behind.post("/v1/fleet/push-object", 2**25) == 413


def listening_addresses(port: int) -> set[str]:
    """The addresses of this machine at which something listens on a port, as /proc/net writes them (Linux)."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {
        local.partition(":")[0] for _, local, _, state, *_ in lines if (local[-5:], state) == (f":{port:04X}", "0A")
    }


def test_from_an_empty_folder_to_a_finished_run_of_two_sites(members):
    # the coordinator
    text = members.fedssl("provision", "--example")
    for example, port in (("port: 8000", members.port), ("internal_port: 8001", members.internal_port)):
        text = re.sub(rf"\b{example}\b", example.split()[0] + f" {port}", text)
    (members.folder / "consortium.yaml").write_text(text)
    members.fedssl("provision", "consortium.yaml")

    # the server
    members.start("server")
    members.wait_for("server", "registered the key of hospital-b")
    printed = members.fedssl("app", *APP, "--output", str(members.folder / "run"))
    [digest] = re.findall("[0-9a-f]{64}", printed)

    # the sites: one approves the app, the other one has approved another app
    members.approve("hospital-a", digest)
    members.approve("hospital-b", "0" * 64)
    poll(lambda: is_listening(members.port), "the reverse proxy listens")
    printed = members.fedssl("doctor", "--consortium", "consortium/hospital-a")
    assert all(line.startswith("ok ") for line in printed.splitlines()), printed
    members.start("hospital-a")
    members.start("hospital-b")

    answer = members.flwr("run", str(members.folder / "app"), "consortium")
    assert answer["success"], answer
    run = str(answer["run-id"])
    members.wait_for("hospital-b", f"the app has the digest {digest}, and the approved digest is {'0' * 64}")
    assert members.status(run) == "running"
    assert not list(members.consortium.glob("hospital-b/state/*"))
    require_reverse_proxy(members, run)
    members.approve("hospital-b", digest)  # while it runs
    poll(lambda: members.status(run).startswith("finished"), "the run ends", pause=0.5)
    assert members.status(run) == "finished:completed", members.logs()
    assert RunDirectory.open(members.folder / "run").checkpoint.round == 2

    # the coordinator revokes a site
    assert "unregistered" not in members.fedssl("provision", "register", "consortium/server")
    members.fedssl("provision", "revoke", "hospital-b")
    printed = members.fedssl("provision", "register", "consortium/server")
    assert printed.count("unregistered the key of node") == 1
    poll(lambda: members.processes["hospital-b"].poll() is not None, "the revoked site is shut out and ends")
    assert members.processes["hospital-b"].returncode == 1
    assert "the server does not accept this site" in members.log("hospital-b").read_text(errors="replace")
    assert members.processes["hospital-a"].poll() is None

    members.stop()
    poll(lambda: not marked(f"{members.folder}/"), "everything that the start scripts started has ended")
    assert not is_listening(members.port)
    assert not is_listening(members.internal_port)
