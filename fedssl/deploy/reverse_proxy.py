"""The reverse proxy's configuration: an nginx in front of the SuperLink that passes the sites' interface alone."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from ..errors import UserError
from ..run_folder.storage import write_atomically
from ..templates import fill_template
from .limits import LARGEST_BODY


def write_reverse_proxy(folder: Path, port: int, superlink_host: str, superlink_port: int) -> Path:
    """Write the configuration of an nginx that listens on `port` for the SuperLink, and return its path.

    `folder` holds server.crt and server.key; the configuration and nginx's own files are written here too.

    Raises:
        UserError: other machines would reach the SuperLink itself; both ports are the same; nginx could not read the
            folder's name; the file cannot be written.
    """
    try:
        is_loopback = superlink_host == "localhost" or ip_address(superlink_host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise UserError(
            f"behind a reverse proxy the SuperLink must listen on this machine alone, but --host is {superlink_host}: "
            "leave --host out, or give --host 127.0.0.1"
        )
    if port == superlink_port:
        raise UserError(f"--reverse-proxy and --port are both {port}: give the reverse proxy a port of its own")
    if set(str(folder)) & set('"\\$\n'):
        raise UserError(f"nginx cannot read the folder's name {str(folder)!r}: use one without quotes, \\ and $")
    host = f"[{superlink_host}]" if ":" in superlink_host else superlink_host
    path = folder / "nginx.conf"
    values = {"folder": folder, "path": path, "port": port, "superlink": f"{host}:{superlink_port}"}
    text = fill_template("fedssl.deploy", "nginx.conf.jinja", **values, megabytes=LARGEST_BODY // 2**20)
    write_atomically(path, text.encode())
    return path
