"""The sites' keys that a running SuperLink accepts, and the operator's connection to it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from ..engines.flower.site_keys import MANIFEST, key_fingerprint, read_manifest
from ..errors import UserError
from ..run_folder.storage import make_folder, write_atomically
from .keys import read_public, require_own


def operators_client(address: str, certificate: Path) -> ControlHttpClient:
    """Return a client of the operator's interface of the SuperLink at host:port; `certificate` is its authority's."""
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    return ControlHttpClient.from_server_address(address, False, str(certificate.absolute()), interceptors=interceptors)


def register_keys(keys: Path, address: str, certificate: Path, superlink: int | None = None) -> list[str]:
    """Register the keys of a folder, files NAME.pub, at a SuperLink, and unregister all others; return a line for each.

    Keys that are not in the folder's manifest are not registered. The lines say by site who is in, new or out. The
    SuperLink's `address` is host:port, reached from its own machine; `certificate` is its authority's. If its process
    id `superlink` is given, wait up to 180 s until it listens, as long as the process runs.

    Raises:
        UserError: the SuperLink is not reached, refuses the request, or has ended; a file is not a public key; a key of
            the manifest is missing; other users can write the folder or a file in it.
    """
    wanted, done = _accepted(keys)
    try:
        with operators_client(address, certificate) as client:
            nodes: dict[bytes, Any] = {}
            for node in _list_nodes(client, superlink):
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
                    done.append(f"in:      {name}, {about}")
                else:  # Flower keeps it for ever, and registers it no more
                    advice = "the site must make a new key (fedssl provision revoke, request and answer)"
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
