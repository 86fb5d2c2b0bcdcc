"""The texts in a consortium's folders: start scripts, systemd units, site files and pages of steps."""

from __future__ import annotations

from .consortium import Consortium

_SERVER_START = """\
#!/bin/sh
# Starts the server of {consortium}: the SuperLink{with_proxy}. It registers the keys in sites/.
# Ctrl-C or kill ends all of it.
set -eu
umask 077
cd "$(dirname "$0")"
{require_proxy}superlink=
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
{keep_proxy}wait $superlink
"""

_REQUIRE_PROXY = """\
PATH=$PATH:/usr/sbin
if ! command -v nginx >/dev/null; then
    echo "nginx, the reverse proxy in front of the SuperLink, is not installed: apt-get install nginx-light" >&2
    exit 2
fi
"""

_KEEP_PROXY = """\
start_wall() {
    setsid nginx -c "$PWD/nginx.conf" -g "daemon off;" &
    wall=$!
}
start_wall
# The SuperLink listens on this machine alone: without the reverse proxy no site reaches it, and no other machine does.
restarts=0
while kill -0 $superlink 2>/dev/null; do
    if ! kill -0 "$wall" 2>/dev/null; then
        kill -s KILL -- "-$wall" 2>/dev/null || true # workers that have lost their master keep the port
        restarts=$((restarts + 1))
        if [ $restarts -gt 5 ]; then
            echo "start.sh: the reverse proxy (nginx) has ended 5 times and is not started again: see nginx.log;" \
                "the server ends too" >&2
            exit 1
        fi
        echo "start.sh: the reverse proxy (nginx) has ended and is started again" >&2
        start_wall
    fi
    sleep 1 &
    wait $!
done
"""

SITE_START = """\
#!/bin/sh
# Starts the SuperNode of {site} in {consortium}. Options are passed on to fedssl supernode, such as --allow DIGEST.
set -eu
umask 077
cd "$(dirname "$0")"
exec fedssl supernode site.yaml --superlink {address}:{port} --root-certificates ca.crt --key site.key "$@"
"""

SYSTEMD_UNIT = """\
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

SITE_YAML = """\
client: {client}   # the site's number; {site} has this number alone
state: ./state     # keeps the client's model between rounds
# The site's own images; without them the site takes its share of the recipe's data, which is meant for trials:
# data: {{name: images, path: /data/scans}}
# device: cuda:0   # by default the recipe's
# Digests of the apps that may run here. An empty list refuses every app that --allow does not name.
approved_apps: []
"""

AUTHORITY_PAGE = """\
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

1. Install `fedssl` with Flower{proxy_package}.
2. Start: `./start.sh`. For a service, adapt `{unit}` and copy it to `/etc/systemd/system/`.
3. Write an app, give its digest to the sites, and start a run when they have approved it:

       fedssl app RECIPE app
       FLWR_HOME=FOLDER/flower flwr run app consortium

   FOLDER is this folder. `flower/config.toml` is written when the server starts.

Sites reach {address}, port {port}. Open this port alone. A site's public key is accepted if it is in `sites/`. After
`fedssl provision revoke` or a new site, copy `sites/` here and call `fedssl provision register FOLDER` on this machine,
which applies the change to the running server.
"""

_SERVER_KEY_REQUEST = """\
Before step 2 call
`fedssl provision request FOLDER` here: it makes the server's private key, which never leaves this machine. Send the
request to the coordinator, and put the `server.crt` that you get back into this folder."""

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

_SITE_KEY_REQUEST = """

Before step 3, make this site's private key, which never leaves this machine, and send the written request file to the
coordinator:

    fedssl provision request FOLDER"""

_FINGERPRINTS = """\
# Fingerprints of {consortium}

Compare them by telephone with each site, and the authority's with the server, before the first run.

Authority (SHA-256 of `ca.crt`): {authority}

{lines}"""


def server_start(consortium: Consortium) -> str:
    """Return the server's start script."""
    server = consortium.server
    options = f"--host 0.0.0.0 --port {server.port}"
    texts = {"with_proxy": "", "require_proxy": "", "keep_proxy": ""}
    if server.wall:
        options = f"--port {server.internal_port} --wall {server.port}"
        texts = {"require_proxy": _REQUIRE_PROXY, "keep_proxy": _KEEP_PROXY}
        texts["with_proxy"] = " and the reverse proxy in front of it"
    return _SERVER_START.format(consortium=consortium.name, options=options, **texts)


def server_page(consortium: Consortium, unit: str, has_key: bool) -> str:
    """Return the server's page of steps."""
    return _SERVER_PAGE.format(
        consortium=consortium.name,
        keys="`server.key` is secret." if has_key else _SERVER_KEY_REQUEST,
        proxy_package=" and nginx (`apt-get install nginx-light`)" if consortium.server.wall else "",
        unit=unit,
        address=consortium.server.address,
        port=consortium.server.port,
    )


def site_page(consortium: str, site: str, unit: str, has_key: bool) -> str:
    """Return a site's page of steps."""
    keys = " `site.key` is secret: the coordinator deletes\nhis copy of it." if has_key else _SITE_KEY_REQUEST
    return _SITE_PAGE.format(consortium=consortium, site=site, unit=unit, keys=keys)


def fingerprints_page(consortium: str, authority: str, keys: dict[str, str]) -> str:
    """Return what the coordinator compares with the sites by telephone; `keys` has a fingerprint for each site."""
    lines = "".join(f"- {site}: {fingerprint}\n" for site, fingerprint in keys.items())
    return _FINGERPRINTS.format(consortium=consortium, authority=authority, lines=lines)
