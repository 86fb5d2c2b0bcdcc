"""The file that describes a consortium: its server and its sites."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from ..errors import UserError
from ..options import Options, explain_errors
from ..untrusted import MOST_BYTES, expand_home, parse_yaml, read_regular_file

EXAMPLE = """\
# Read by: fedssl provision consortium.yaml
name: our-consortium
server:
  address: localhost   # the name or the IP address by which the sites reach the server
  port: 8000           # where the wall (nginx) listens for them
  internal_port: 8001  # where the SuperLink listens behind the wall, on the server's machine alone
sites:                 # in the order of the clients' numbers, from 0; add new sites at the end
  - hospital-a
  - hospital-b
valid_days: 365        # how long the server's certificate is valid; a later call renews it
"""


#: letters, digits and hyphens: names become folders, systemd units and certificates' subjects
_NAME = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"


#: a host name or an IPv4 address
_ADDRESS = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$"


#: folders of the output that are not a site's
RESERVED_NAMES = ("authority", "server")


#: in the server's and in each site's folder
MEMBER_FILE = "member.yaml"


Model = TypeVar("Model", bound=Options)


class ServerOptions(Options):
    """Where the sites reach the server."""

    address: str = Field(
        ..., pattern=_ADDRESS, description="host name or IPv4 address by which the sites reach the server"
    )
    port: int = Field(8000, ge=1, le=65535, description="port at which the sites reach the server")
    internal_port: int = Field(
        8001, ge=1, le=65535, description="port of the SuperLink behind the wall, on the server's machine alone"
    )
    wall: bool = Field(
        True, description="put nginx in front of the SuperLink; without it the SuperLink itself listens at port"
    )

    @model_validator(mode="after")
    def _require_two_ports(self) -> ServerOptions:
        if self.wall and self.port == self.internal_port:
            raise ValueError("port and internal_port must differ: the wall and the SuperLink each need a port")
        return self


class Member(Options):
    """What a site's or the server's own folder says of its place in the consortium, in `member.yaml`."""

    consortium: str = Field(..., pattern=_NAME, description="the consortium's name")
    name: str = Field(..., pattern=_NAME, description="the site's name, or server")
    server: ServerOptions = Field(..., description="where the sites reach the server")


class Consortium(Options):
    """A consortium: one server and its sites."""

    name: str = Field(..., pattern=_NAME, description="lower-case letters, digits and hyphens; named in certificates")
    server: ServerOptions = Field(..., description="where the sites reach the server")
    sites: list[str] = Field(
        ..., min_length=1, max_length=1000, description="the sites' names in the order of their client numbers"
    )
    valid_days: int = Field(
        365, ge=1, le=3650, description="days for which a certificate of the server is valid; a later call renews it"
    )

    @field_validator("sites", mode="after")
    @classmethod
    def _require_site_names(cls, sites: list[str]) -> list[str]:
        for site in sites:
            require_site_name(site)
        repeated = sorted({site for site in sites if sites.count(site) > 1})
        if repeated:
            raise ValueError(f"each site needs a name of its own, but {repeated[0]} occurs more than once")
        return sites


def require_site_name(name: str) -> None:
    """Refuse a site's name that could not be the name of a folder and of a systemd unit.

    Raises:
        ValueError: the name has other characters than it may have, or names another folder of the output.
    """
    if not re.fullmatch(_NAME, name):
        raise ValueError(
            f"the site's name {name!r} is invalid: expected 1 to 40 lower-case letters, digits and hyphens, without a "
            "hyphen at either end"
        )
    if name in RESERVED_NAMES:
        raise ValueError(f"a site cannot be named {name}: that is the name of another folder; choose another name")


def load_consortium(path: str | Path) -> Consortium:
    """Read a consortium's file.

    Raises:
        UserError: no such file; not YAML; a key or value that is not allowed.
    """
    return _load(expand_home(path), Consortium, "the consortium's file", "fedssl provision --example prints one")


def load_member(folder: Path) -> Member:
    """Read `member.yaml` of a site's or the server's folder.

    Raises:
        UserError: the folder is not one that `provision` wrote, or the file has been damaged.
    """
    return _load(folder / MEMBER_FILE, Member, "the file", f"name a folder that fedssl provision wrote, not {folder}")


def _load(path: Path, model: type[Model], kind: str, hint: str) -> Model:
    try:
        text = read_regular_file(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{kind} {path} cannot be read: {reason}; {hint}") from error
    values = parse_yaml(text, f"{kind} {path}")
    if not isinstance(values, dict):
        expected = ", ".join(model.model_fields)
        raise UserError(f"{kind} {path} must hold the keys {expected}, got {type(values).__name__}; {hint}")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {'; '.join(explain_errors(error, model))}") from error
