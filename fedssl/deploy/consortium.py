"""The files that describe a consortium: `consortium.yaml`, and `server.yaml` in the server's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from ..options import Options, read_options

EXAMPLE = """\
# Adapt the names. Next: fedssl provision consortium.yaml
name: our-consortium
server:
  address: localhost   # the name or the IP address by which the sites reach the server
  port: 8000           # where the reverse proxy (nginx) listens for them
  internal_port: 8001  # where the SuperLink listens behind it, on the server's machine alone
sites:                 # in the order of the clients' numbers, from 0; add new sites at the end
  - hospital-a
  - hospital-b
valid_days: 365        # how long the server's certificate is valid; a later call renews it
"""

#: how the server starts with a first run of the sites' own images
FIRST_RUN = "./start.sh fedbyol 'data.image_shape=[3, 64, 64]' training.batch_size=32 rounds=2"

SERVER_FILE = "server.yaml"
#: a certificate that ends within this many days is renewed
RENEWAL_DAYS = 30

#: letters, digits and hyphens: names become folders, systemd units and certificates' subjects
_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"


class ServerOptions(Options):
    """The address and the ports of the server."""

    address: str = Field(
        ...,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$",
        description="host name or IPv4 address by which the sites reach the server",
    )
    port: int = Field(8000, ge=1, le=65535, description="port at which the sites reach the server")
    internal_port: int = Field(
        8001, ge=1, le=65535, description="the SuperLink's port behind the reverse proxy, on its own machine alone"
    )

    @model_validator(mode="after")
    def _require_two_ports(self) -> ServerOptions:
        if self.port == self.internal_port:
            raise ValueError("port and internal_port must differ: the reverse proxy and the SuperLink each need a port")
        return self

    @property
    def superlink(self) -> str:
        """The address of the SuperLink on its own machine."""
        return f"127.0.0.1:{self.internal_port}"


class Consortium(Options):
    """A consortium: one server and its sites."""

    name: str = Field(..., pattern=_NAME, description="lower-case letters, digits and hyphens; named in certificates")
    server: ServerOptions = Field(..., description="where the sites reach the server")
    sites: list[Annotated[str, StringConstraints(pattern=_NAME)]] = Field(
        ..., min_length=1, max_length=1000, description="the sites' names in the order of their client numbers"
    )
    valid_days: int = Field(
        365,
        gt=RENEWAL_DAYS,  # or each call would renew the certificate that the last one wrote
        le=3650,
        description=f"days for which a certificate of the server is valid; renewed {RENEWAL_DAYS} days before its end",
    )

    @field_validator("sites", mode="after")
    @classmethod
    def _require_site_names(cls, sites: list[str]) -> list[str]:
        for site in {"authority", "server"} & {*sites}:
            raise ValueError(f"a site cannot be named {site}: that is the name of another folder; choose another name")
        repeated = sorted({site for site in sites if sites.count(site) > 1})
        if repeated:
            raise ValueError(f"each site needs a name of its own, but {repeated[0]} occurs more than once")
        return sites


def load_consortium(path: str | Path) -> Consortium:
    """Read a consortium's file; raise UserError if it is missing, not YAML, or has a value that is not allowed."""
    return read_options(path, Consortium, "the consortium's file", "fedssl provision --example prints one")


def load_server(folder: Path) -> ServerOptions:
    """Read `server.yaml` of a folder; raise UserError if `provision` did not write the folder, or it is damaged."""
    hint = f"name the server's folder, which fedssl provision wrote, not {folder}"
    return read_options(folder / SERVER_FILE, ServerOptions, "the file", hint)
