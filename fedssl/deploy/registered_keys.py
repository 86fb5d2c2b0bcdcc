"""The sites' keys that a running SuperLink accepts, brought in line with a folder of public keys."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from ..errors import UserError
from ..run.storage import make_folder, write_atomically

_WAIT_SECONDS = 180.0


def register_keys(keys: Path, address: str, certificate: Path, superlink: int | None = None) -> list[str]:
    """Register the keys of a folder at a SuperLink, and unregister all others.

    Args:
        keys: a folder with a file NAME.pub for each site.
        address: of the SuperLink, as host:port, reached from its own machine.
        certificate: of the SuperLink's authority.
        superlink: the SuperLink's process; it is waited for until it listens, as long as the process runs.

    Returns:
        A line for each key that was registered or unregistered.

    Raises:
        UserError: the SuperLink is not reached, refuses the request, or has ended; a file is not a public key.
    """
    wanted = {_public_key(path): path.stem for path in sorted(keys.glob("*.pub"))}
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    done = []
    try:
        with ControlHttpClient.from_server_address(
            address, False, str(certificate.absolute()), interceptors=interceptors
        ) as client:
            nodes = _list_nodes(client, address, superlink)
            present = {_same_form(node.public_key): node.node_id for node in nodes if node.status != "unregistered"}
            for key, node in present.items():
                if key not in wanted:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node))
                    done.append(f"unregistered the key of node {node}, which is not in {keys}")
            for key, name in wanted.items():
                if key not in present:
                    client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                    done.append(f"registered the key of {name}")
    except (httpx.HTTPError, OSError) as error:
        raise UserError(
            f"the SuperLink at {address} refuses the keys of {keys} or is not reached: {_reason(error)}; call this on "
            "the SuperLink's machine while it runs"
        ) from error
    return done


def write_connection(folder: Path, address: str, certificate: Path) -> None:
    """Write Flower's config.toml, with which the operator reaches the SuperLink as `consortium`.

    Raises:
        UserError: the file cannot be written.
    """
    make_folder(folder)
    lines = [
        "[superlink]",
        'default = "consortium"',
        "",
        "[superlink.consortium]",
        f"address = {json.dumps(address)}",
        f"root-certificates = {json.dumps(str(certificate.absolute()), ensure_ascii=False)}",
    ]
    write_atomically(folder / "config.toml", ("\n".join(lines) + "\n").encode())


def _list_nodes(client: ControlHttpClient, address: str, superlink: int | None):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            return client.ListNodes(ListNodesRequest()).nodes_info
        except httpx.TransportError:
            if superlink is None or time.monotonic() > deadline:
                raise
            if not _runs(superlink):
                raise UserError(f"the SuperLink (process {superlink}) has ended: see what it printed") from None
            time.sleep(0.5)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # no /proc
        return True
    return state != "Z"  # a zombie has ended, and its shell has not asked for its exit code yet


def _public_key(path: Path) -> bytes:
    try:
        return public_key_to_bytes(load_ssh_public_key(path.read_bytes()))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a public key as ssh-keygen writes it: {error}") from error


def _same_form(key: bytes) -> bytes:
    return public_key_to_bytes(load_pem_public_key(key))  # type: ignore[arg-type]


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}: {' '.join(error.response.text.split())[:300]}"
    return " ".join(str(error).split()) or type(error).__name__
