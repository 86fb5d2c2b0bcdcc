"""The sites' keys that a running SuperLink and the reverse proxy in front of it accept."""

import base64
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from ..engines.flower.site_files import MANIFEST, key_fingerprint, read_manifest
from ..errors import UserError
from ..run_folder.storage import write_atomically
from .keys import read_public, require_own


def register_keys(keys: Path, address: str, certificate: Path, seconds: float = 0.0) -> list[str]:
    """Register the keys of a folder, files NAME.pub, at a SuperLink, and unregister all others; return a line for each.

    Keys that are not in the folder's manifest are not registered, and the reverse proxy passes no others. The lines
    say by site who is in, and whether it is connected, new or out. The
    SuperLink's `address` is host:port, reached from its own machine, for which is waited up to `seconds`; `certificate`
    is its authority's.

    Raises:
        UserError: the SuperLink is not reached, or refuses the request; a file is not a public key; a key of
            the manifest is missing; other users can write the folder or a file in it.
    """
    wanted, done = _accepted(keys)
    _let_through(keys.parent, {name: key for key, (name, _) in wanted.items()})
    authority, interceptors = str(certificate.absolute()), [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    try:
        with ControlHttpClient.from_server_address(address, False, authority, interceptors=interceptors) as client:
            nodes: dict[bytes, Any] = {}
            for node in _list_nodes(client, seconds):
                public: Any = load_pem_public_key(node.public_key)
                nodes[public_key_to_bytes(public)] = node
                if node.status != "unregistered" and public_key_to_bytes(public) not in wanted:
                    client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
                    name = node.name or f"node {node.node_id}"
                    done.append(f"out:     {name}, key {key_fingerprint(public)}: unregistered")
            for key, (name, about) in wanted.items():
                if key not in nodes:
                    client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                    done.append(f"new:     {name}, {about}")
                elif nodes[key].status != "unregistered":
                    done.append(f"in:      {name}, {about}: {_connection(nodes[key])}")
                else:  # Flower keeps it for ever, and registers it no more
                    advice = "the site must make a new key (fedssl provision revoke, ssh-keygen, provision answer)"
                    done.append(f"refused: {name}, {about}: it was unregistered earlier; {advice}")
    except (httpx.HTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            reason = f"HTTP {error.response.status_code}: {' '.join(error.response.text.split())[:300]}"
        raise UserError(
            f"the SuperLink at {address} refuses the keys of {keys} or is not reached: {reason}; call this on the "
            "SuperLink's machine while it runs"
        ) from error
    return done


def _accepted(folder: Path) -> tuple[dict[bytes, tuple[str, str]], list[str]]:
    """Return the keys that a folder of public keys and its manifest both name, and lines on all others.

    Of each key there are the site's name, and what is said of it.
    """
    require_own(folder)
    public = {path.stem: read_public(path) for path in sorted(folder.glob("*.pub"))}
    texts = {name: f"key {key_fingerprint(key)}" for name, key in public.items()}
    listed = read_manifest(folder / MANIFEST).sites
    missing = [name for name, key in listed.items() if key and name not in public]
    if missing:
        raise UserError(
            f"{folder / missing[0]}.pub is missing, but {MANIFEST} has its key: copy the whole folder again from the "
            f"coordinator; to shut a site out, write null for its key in {MANIFEST}"
        )
    sites, lines = {}, []
    for name, key in public.items():
        if listed.get(name) == key_fingerprint(key):
            sites[public_key_to_bytes(key)] = name, f"client {list(listed).index(name)}, {texts[name]}"
        else:
            reason = "it was revoked or belongs elsewhere; delete the file"
            lines.append(f"refused: {folder / name}.pub, {texts[name]}: it is not in {MANIFEST}: {reason}")
    lines += [f"no key:  {name}, client {client}" for client, name in enumerate(listed) if listed[name] is None]
    return sites, lines


def _let_through(server: Path, keys: dict[str, bytes]) -> None:
    """Let the reverse proxy of a server's folder pass the requests of these sites alone; one that runs is told so."""
    lines = [f'"{base64.b64encode(key).decode()}" {name};\n' for name, key in keys.items()]
    write_atomically(server / "nginx.sites", "".join(lines).encode())
    with suppress(OSError, ValueError):  # it does not run
        process = int((server / "nginx.pid").read_text())
        if Path(f"/proc/{process}/comm").read_text() == "nginx\n":
            os.kill(process, signal.SIGHUP)


def _connection(node: NodeInfo) -> str:
    """Return whether a site is connected, and since when or when it was; one that was cut off is online for a while."""
    if not node.last_activated_at:
        return "never connected"
    at = datetime.fromisoformat(node.last_activated_at).astimezone(timezone.utc)
    return f"{node.status}, connected at {at:%Y-%m-%d %H:%M:%S} UTC"


def _list_nodes(client: ControlHttpClient, seconds: float) -> Iterable[NodeInfo]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return client.ListNodes(ListNodesRequest()).nodes_info
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
