"""A site's own file, and the server's manifest, which binds a client's number to the site's key. They need no torch.

Flower knows a node by its registered key, and a run's process gets the keys of its nodes from the SuperLink. So a site
takes part as the client that the server's manifest gives its key.
"""

from __future__ import annotations

import base64
import os
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key, ssh_key_fingerprint
from pydantic import Field, StringConstraints, model_validator

from ...data.options import DataOptions
from ...errors import UserError
from ...options import Options, read_options

#: in the server's folder, the sites' public keys, files NAME.pub, and the manifest beside them
SITES, MANIFEST = "sites", "manifest.yaml"
#: the environment variable with which `fedssl superlink` tells the processes of runs where the manifest is
VARIABLE = "FEDSSL_KEY_MANIFEST"

#: the SHA-256 of an app, which `fedssl app` prints
AppDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SiteOptions(Options):
    """The keys of a site's own YAML file. The file never leaves the site."""

    data: DataOptions | None = Field(None, description="its own images; its share of the recipe's data where not given")
    architecture: str | None = Field(None, description="its own; the recipe's for this client where not given")
    device: str | None = Field(None, pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="the recipe's where not given")
    state: Path = Field(..., description="the folder that keeps the client's model between rounds")
    approved_apps: list[AppDigest] | None = Field(
        None, max_length=1000, description="digests of the apps that may run at the site; any app where not given"
    )


def load_site(path: str | Path) -> SiteOptions:
    """Return the options in a site's file."""
    hint = "it holds keys with values, such as state: FOLDER"
    return read_options(path, SiteOptions, "the site's file", hint)


Fingerprint = Annotated[str, StringConstraints(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$")]


class KeyManifest(Options):
    """The sites in the order of their client numbers, from 0, with their keys' fingerprints."""

    sites: dict[str, Fingerprint | None] = Field(
        ...,
        min_length=1,
        max_length=1000,
        description="by site, in the clients' order: the fingerprint as ssh-keygen -l prints it; null for no key",
    )

    @model_validator(mode="after")
    def _require_different_keys(self) -> KeyManifest:
        for one, other in combinations([site for site, key in self.sites.items() if key], 2):
            if self.sites[one] == self.sites[other]:
                raise ValueError(f"{one} and {other} have the same key: each site needs a key of its own")
        return self

    @property
    def clients(self) -> dict[str, int]:
        """The clients' numbers by their keys' fingerprints."""
        return {key: client for client, key in enumerate(self.sites.values()) if key is not None}


def read_manifest(path: Path) -> KeyManifest:
    """Read a manifest; raise UserError if it is missing, invalid, or can be written by other users."""
    hint = "fedssl provision writes it, and docs/deploy.md says how to write it by hand"
    return read_options(path, KeyManifest, "the manifest of keys", hint)


def key_fingerprint(key: EllipticCurvePublicKey) -> str:
    """Return a public key's fingerprint as `ssh-keygen -l` prints it: SHA256 and the digest in base64."""
    return "SHA256:" + base64.b64encode(ssh_key_fingerprint(key, SHA256())).decode().rstrip("=")


def manifest_of_run() -> Path:
    """Return where the manifest of the server is whose SuperLink has started this process."""
    return Path(os.environ.get(VARIABLE, MANIFEST))


def bound_clients(grid: Any) -> dict[int, int | str]:
    """Return the client's number of each connected node of Flower's grid, or a text that says why it has none."""
    nodes, path = grid.get_nodes(), manifest_of_run()
    try:
        clients = read_manifest(path).clients
    except UserError as error:  # it was changed while the run goes on
        return {node.node_id: str(error) for node in nodes}
    keys: dict[int, Any] = {node.node_id: load_pem_public_key(node.public_key) for node in nodes}
    prints = {node: key_fingerprint(key) for node, key in keys.items()}
    return {node: clients.get(text, f"its key {text} is in no line of {path}") for node, text in prints.items()}
