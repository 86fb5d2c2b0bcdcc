"""The reverse proxy's configuration: an nginx in front of the SuperLink that passes the sites' interface alone."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from ..run_folder.storage import write_atomically
from ..templates import fill_template
from .limits import LARGEST_BODY


def write_reverse_proxy(folder: Path, port: int, superlink: str) -> Path:
    """Write the configuration of an nginx that listens on `port` for the SuperLink, HOST:PORT, and return its path.

    `folder` holds server.crt and server.key; the configuration and nginx's own files are written here too.

    Raises:
        UserError: both ports are the same; nginx could not read the folder's name; the file cannot be written.
    """
    if superlink.endswith(f":{port}"):
        raise UserError(f"--reverse-proxy and --port are both {port}: give the reverse proxy a port of its own")
    if set(str(folder)) & set('"\\$\n'):
        raise UserError(f"nginx cannot read the folder's name {str(folder)!r}: use one without quotes, \\ and $")
    path = folder / "nginx.conf"
    values = {"folder": folder, "path": path, "port": port, "superlink": superlink}
    text = fill_template("fedssl.deploy", "nginx.conf.jinja", **values, megabytes=LARGEST_BODY // 2**20)
    write_atomically(path, text.encode())
    return path
