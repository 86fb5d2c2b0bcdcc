"""The texts in a server's and a site's folder: start script, systemd unit, page of steps."""

from __future__ import annotations

from .consortium import Consortium, ServerOptions

#: how often a server's start script starts nginx again before it gives up
_MOST_RESTARTS = 5


_SERVER_START = """\
#!/bin/sh
# Starts the server of {consortium}: the SuperLink{with_wall}. It registers the keys in sites/.
# Ctrl-C or kill ends all of it.
set -eu
umask 077
cd "$(dirname "$0")"
{require_wall}superlink=
wall=
stop() {{
    trap - EXIT
    [ -z "$superlink" ] || kill "$superlink" 2>/dev/null || true
    [ -z "$wall" ] || kill -s TERM -- "-$wall" 2>/dev/null || true
    wait
}}
trap stop EXIT
trap 'exit 143' INT TERM
fedssl superlink . {options} &
superlink=$!
fedssl provision register . --superlink-process $superlink
{keep_wall}wait $superlink
"""


_REQUIRE_WALL = """\
PATH=$PATH:/usr/sbin
if ! command -v nginx >/dev/null; then
    echo "nginx, the wall in front of the SuperLink, is not installed: apt-get install nginx-light" >&2
    exit 2
fi
"""


_KEEP_WALL = """\
start_wall() {{
    setsid nginx -c "$PWD/nginx.conf" -g "daemon off;" &
    wall=$!
}}
start_wall
# The SuperLink listens on this machine alone: without the wall no site reaches it, and no other machine does.
restarts=0
while kill -0 $superlink 2>/dev/null; do
    if ! kill -0 "$wall" 2>/dev/null; then
        kill -s KILL -- "-$wall" 2>/dev/null || true # workers that have lost their master keep the port
        restarts=$((restarts + 1))
        if [ $restarts -gt {most_restarts} ]; then
            echo "start.sh: the wall (nginx) has ended {most_restarts} times and is not started again: see nginx.log;" \
                "the server ends too" >&2
            exit 1
        fi
        echo "start.sh: the wall (nginx) has ended and is started again" >&2
        start_wall
    fi
    sleep 1 &
    wait $!
done
"""


_SITE_START = """\
#!/bin/sh
# Starts the SuperNode of {site} in {consortium}. Options are passed on to fedssl supernode, such as --allow DIGEST.
set -eu
umask 077
cd "$(dirname "$0")"
exec fedssl supernode site.yaml --superlink {address}:{port} --root-certificates ca.crt --key site.key "$@"
"""


_UNIT = """\
# Copy this file to /etc/systemd/system/ and adapt three things before: User, the folder (/opt/fedssl/{folder}), and
# the folder of the fedssl command in PATH.
[Unit]
Description={description}
After=network-online.target
Wants=network-online.target

[Service]
User=fedssl
WorkingDirectory=/opt/fedssl/{folder}
Environment=PATH=/opt/fedssl/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ExecStart=/opt/fedssl/{folder}/start.sh
Restart=on-failure
RestartSec=60
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""


_SITE_YAML = """\
client: {client}   # the site's number; {site} has this number alone
state: ./state     # keeps the client's model between rounds
# The site's own images; without them the site takes its share of the recipe's data, which is meant for trials:
# data: {{name: images, path: /data/scans}}
# device: cuda:0   # by default the recipe's
# Digests of the apps that may run here. An empty list refuses every app that --allow does not name.
approved_apps: []
"""


_AUTHORITY_PAGE = """\
# The authority of {consortium}

`ca.key` is the authority's private key. Whoever has it can pretend to be the server. The server does not need it.

1. Move this folder to a medium that is not connected to a network, such as an encrypted stick in a safe.
2. Bring it back only to call `fedssl provision` or `fedssl provision answer`, which issue certificates with it.
3. If `ca.key` is lost or stolen, provision the consortium anew in another folder, and give every site the new `ca.crt`.

`ca.crt` is public. `sites.txt` holds the sites in the order of their client numbers.
"""


_SERVER_PAGE = """\
# The server of {consortium}

This folder belongs on the server's machine, under a user of its own. {keys}

1. Install `fedssl` with Flower{wall_package}.
2. Start: `./start.sh`. For a service, adapt `{unit}` and copy it to `/etc/systemd/system/`.
3. Write an app, give its digest to the sites, and start a run when they have approved it:

       fedssl app RECIPE app
       FLWR_HOME=FOLDER/flower flwr run app consortium

   FOLDER is this folder. `flower/config.toml` is written when the server starts.

Sites reach {address}, port {port}. Open this port alone. A site's public key is accepted if it is in `sites/`. After
`fedssl provision revoke` or a new site, copy `sites/` here and call `fedssl provision register FOLDER` on this machine,
which applies the change to the running server.
"""


_SITE_PAGE = """\
# {site} in {consortium}

This folder belongs on the machine of {site}, under a user of its own.{keys}

1. Install `fedssl` with Flower.
2. Name your images under `data` in `site.yaml`.
3. Check everything: `fedssl doctor --consortium FOLDER`, where FOLDER is this folder.
4. Call the coordinator by telephone, at a number that you know from elsewhere. Both read out the fingerprints: the
   authority's and that of this site's key. `fedssl doctor --consortium FOLDER` prints yours; the coordinator has them
   in `fingerprints.md`. If one differs, start nothing: the folder was changed on its way.
5. Read the app that the operator wants to run, and approve its digest: add it to `approved_apps` in `site.yaml`, or
   start with `./start.sh --allow DIGEST`. `./start.sh --ask` shows each new app and asks on the terminal.
6. Start: `./start.sh`. For a service, adapt `{unit}` and copy it to `/etc/systemd/system/`.
"""


_KEY_REQUEST = """

Before step 3, make this site's private key, which never leaves this machine, and send the written request file to the
coordinator:

    fedssl provision request FOLDER
"""


def server_start(consortium: Consortium) -> str:
    """The server's start script."""
    server = consortium.server
    options = (
        f"--port {server.internal_port} --wall {server.port}" if server.wall else f"--host 0.0.0.0 --port {server.port}"
    )
    return _SERVER_START.format(
        consortium=consortium.name,
        with_wall=" and the wall in front of it" if server.wall else "",
        require_wall=_REQUIRE_WALL if server.wall else "",
        options=options,
        keep_wall=_KEEP_WALL.format(most_restarts=_MOST_RESTARTS) if server.wall else "",
    )


def server_page(consortium: Consortium, unit: str, has_key: bool) -> str:
    """The server's page of steps."""
    request = (
        "Before step 2 call\n`fedssl provision request FOLDER` here: it makes the server's private key, which never "
        "leaves this machine. Send the\nrequest to the coordinator, and put the `server.crt` that you get back into "
        "this folder."
    )
    keys = "`server.key` is secret." if has_key else request
    return _SERVER_PAGE.format(
        consortium=consortium.name,
        keys=keys,
        wall_package=" and nginx (`apt-get install nginx-light`)" if consortium.server.wall else "",
        unit=unit,
        address=consortium.server.address,
        port=consortium.server.port,
    )


def site_start(consortium: str, site: str, server: ServerOptions) -> str:
    """A site's start script."""
    return _SITE_START.format(consortium=consortium, site=site, address=server.address, port=server.port)


def site_page(consortium: str, site: str, unit: str, has_key: bool) -> str:
    """A site's page of steps."""
    keys = " `site.key` is secret: the coordinator deletes\nhis copy of it." if has_key else _KEY_REQUEST.rstrip("\n")
    return _SITE_PAGE.format(consortium=consortium, site=site, unit=unit, keys=keys)


def site_file(site: str, client: int) -> str:
    """A site's own YAML file."""
    return _SITE_YAML.format(site=site, client=client)


def systemd_unit(description: str, folder: str) -> str:
    """A systemd unit that runs a folder's start script."""
    return _UNIT.format(description=description, folder=folder)


def authority_page(consortium: str) -> str:
    """What to do with the authority's folder."""
    return _AUTHORITY_PAGE.format(consortium=consortium)


def fingerprints_page(consortium: str, authority: str, keys: dict[str, str]) -> str:
    """What the coordinator compares with the sites by telephone; `keys` has a fingerprint for each site."""
    lines = [
        f"# Fingerprints of {consortium}",
        "",
        "Compare them by telephone with each site, and the authority's with the server, before the first run.",
        "",
        f"Authority (SHA-256 of `ca.crt`): {authority}",
        "",
        *(f"- {site}: {fingerprint}" for site, fingerprint in keys.items()),
    ]
    return "\n".join(lines) + "\n"
