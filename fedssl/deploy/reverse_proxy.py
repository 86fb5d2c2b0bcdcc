"""The reverse proxy's configuration: an nginx in front of the SuperLink that passes the sites' interface alone."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from ..errors import UserError
from ..run_folder.storage import write_atomically
from .limits import LARGEST_BODY

_TEXT = """\
# Written by fedssl superlink --reverse-proxy. Start: nginx -c {path}   Stop: nginx -c {path} -s quit
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
    text = _TEXT.format(
        folder=folder, path=path, port=port, superlink=f"{host}:{superlink_port}", megabytes=LARGEST_BODY // 2**20
    )
    write_atomically(path, text.encode())
    return path
