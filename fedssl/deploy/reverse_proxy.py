"""The wall: an nginx in front of the SuperLink, which lets sites reach their interface alone."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from ..errors import UserError
from ..run.storage import write_atomically
from .limits import LARGEST_BODY

FILE = "nginx.conf"


_TEXT = """\
# Written by fedssl superlink --wall. Start: nginx -c {folder}/{file}   Stop: nginx -c {folder}/{file} -s quit
pid "{folder}/nginx.pid";
error_log "{folder}/nginx.log" warn;

events {{
    worker_connections 1024;
}}

http {{
    access_log off;
    server_tokens off;
    client_body_temp_path "{folder}/nginx-body";
    proxy_temp_path "{folder}/nginx-proxy";
    fastcgi_temp_path "{folder}/nginx-unused";
    uwsgi_temp_path "{folder}/nginx-unused";
    scgi_temp_path "{folder}/nginx-unused";

    # Beyond these nginx answers 503, after which a SuperNode waits and tries again. A SuperNode has a few connections
    # and sends some 40 requests a second; several sites may share an address.
    limit_conn_zone $binary_remote_addr zone=connections:1m;
    limit_req_zone $binary_remote_addr zone=requests:1m rate=200r/s;

    upstream superlink {{
        server {superlink};
        keepalive 16;
    }}

    server {{
        listen {port} ssl;
        ssl_certificate "{folder}/server.crt";
        ssl_certificate_key "{folder}/server.key";
        ssl_protocols TLSv1.2 TLSv1.3;

        client_max_body_size {megabytes}m;
        client_header_timeout 10s;
        client_body_timeout 10s;
        send_timeout 10s;
        limit_conn connections 64;
        limit_req zone=requests burst=1000 nodelay;

        location /v1/fleet/ {{
            # On this machine, so its name is not checked again.
            proxy_pass https://superlink;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $remote_addr;
            # The SuperLink looks at a site's key before it takes a body: nothing is kept here.
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_read_timeout 180s;
        }}

        location / {{
            return 403;
        }}
    }}
}}
"""


def write_wall(folder: Path, port: int, superlink_host: str, superlink_port: int) -> Path:
    """Write the configuration of an nginx that listens on `port` in front of a SuperLink on this machine.

    Args:
        folder: holds server.crt and server.key; the configuration and what nginx writes lie there too.
        port: where the sites reach the SuperLink.
        superlink_host, superlink_port: where the SuperLink itself listens.

    Returns:
        The configuration's path.

    Raises:
        UserError: other machines would reach the SuperLink itself; both ports are the same; nginx could not read the
            folder's name; the file cannot be written.
    """
    if superlink_host != "localhost" and not _is_loopback(superlink_host):
        raise UserError(
            f"behind a wall the SuperLink must listen on this machine alone, but --host is {superlink_host}: leave "
            "--host out, or give --host 127.0.0.1"
        )
    if port == superlink_port:
        raise UserError(f"--wall and --port are both {port}: give the wall a port of its own")
    if set(str(folder)) & set('"\\$\n'):
        raise UserError(f"nginx cannot read the folder's name {str(folder)!r}: use one without quotes, \\ and $")
    host = f"[{superlink_host}]" if ":" in superlink_host else superlink_host
    text = _TEXT.format(
        folder=folder, file=FILE, port=port, superlink=f"{host}:{superlink_port}", megabytes=LARGEST_BODY // 2**20
    )
    path = folder / FILE
    write_atomically(path, text.encode())
    return path


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
