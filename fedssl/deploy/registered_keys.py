"""The sites' keys that a running SuperLink accepts, and the operator's connection to it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from ..errors import UserError
from ..run_folder.storage import make_folder, write_atomically
from .keys import read_public


def register_keys(keys: Path, address: str, certificate: Path, superlink: int | None = None) -> list[str]:
    """Register the keys of a folder, files NAME.pub, at a SuperLink, and unregister all others; return a line for each.

    The SuperLink's `address` is host:port, reached from its own machine; `certificate` is its authority's. If its
    process id `superlink` is given, wait up to 180 s until it listens, as long as the process runs.

    Raises:
        UserError: the SuperLink is not reached, refuses the request, or has ended; a file is not a public key.
    """
    wanted = {public_key_to_bytes(read_public(path)): path.stem for path in sorted(keys.glob("*.pub"))}
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    done = []
    try:
        authority = str(certificate.absolute())
        with ControlHttpClient.from_server_address(address, False, authority, interceptors=interceptors) as client:
            present = {
                public_key_to_bytes(load_pem_public_key(node.public_key)): node.node_id  # type: ignore[arg-type]
                for node in _list_nodes(client, superlink)
                if node.status != "unregistered"
            }
            for key, node in present.items():
                if key not in wanted:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node))
                    done.append(f"unregistered the key of node {node}, which is not in {keys}")
            for key, name in wanted.items():
                if key not in present:
                    client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                    done.append(f"registered the key of {name}")
    except (httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            reason = f"HTTP {error.response.status_code}: {' '.join(error.response.text.split())[:300]}"
        raise UserError(
            f"the SuperLink at {address} refuses the keys of {keys} or is not reached: {reason}; call this on the "
            "SuperLink's machine while it runs"
        ) from error
    return done


def write_connection(folder: Path, address: str, certificate: Path) -> None:
    """Write Flower's config.toml, with which the operator reaches the SuperLink as `consortium`."""
    make_folder(folder)
    text = (
        '[superlink]\ndefault = "consortium"\n\n[superlink.consortium]\n'
        f"address = {json.dumps(address)}\n"
        f"root-certificates = {json.dumps(str(certificate.absolute()), ensure_ascii=False)}\n"
    )
    write_atomically(folder / "config.toml", text.encode())


def _list_nodes(client: ControlHttpClient, superlink: int | None):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 180.0
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
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # no /proc
        return True
    except OSError:
        return False
    return state != "Z"  # a zombie has ended, and its shell has not asked for its exit code yet
