"""`fedssl doctor --consortium`: a line for everything that a site needs, and what to do where something is wrong."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo

from fedssl.deploy import registered_keys, site_check
from fedssl.deploy.certificates import Authority
from fedssl.deploy.keys import server_key
from fedssl.deploy.site_check import Check, check_site
from fedssl.errors import UserError
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.data.image_samples import save_array


class Server:
    """An HTTPS server on this machine, whose certificate and clock can be set."""

    def __init__(self) -> None:
        self.seconds_ahead = 0.0
        self._serves = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def date_time_string(self, timestamp=None):
                now = datetime.now(timezone.utc) + timedelta(seconds=outer.seconds_ahead)
                return format_datetime(now, usegmt=True)

            def do_GET(self):
                self.send_error(403)

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda request, address: None
        self.port: int = self._http.server_address[1]

    def start(self, folder: Path) -> None:
        """Serve with server.crt and server.key of a folder."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self._serves = True

    def close(self) -> None:
        if self._serves:
            self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def folder(server, provisioned, monkeypatch) -> Path:
    """The folders of a consortium whose server is `server`, which has not been started."""
    monkeypatch.setattr(site_check, "_CONNECT_SECONDS", 20.0)
    return provisioned(server={"address": "localhost", "port": server.port})


@pytest.fixture
def site(folder) -> Path:
    return folder / "hospital-a"


def change(site: Path, **changes) -> None:
    """Change the site's file."""
    path = site / "site.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


def by_name(site: Path) -> dict[str, Check]:
    return {check.what: check for check in check_site(site)}


def test_the_command_prints_a_line_for_each_check_and_what_to_do(folder, site, server, fedssl):
    server.start(folder / "server")
    code, out, _ = fedssl("doctor", "--consortium", str(site), columns=400)
    assert code == 1
    assert "to do  data: there is no folder images" in out
    assert "\n       link your images (ln -s FOLDER images), or change data in site.yaml\n" in out
    (site / "images").mkdir()
    save_array(site / "images" / "a.png", random_pixels(9, 9))
    code, out, _ = fedssl("doctor", "--consortium", str(site), columns=400)
    assert code == 0, out
    names = ("authority", "site's key", "server", "clock", "server's certificate", "device", "data", "disk")
    for line, name in zip(out.splitlines(), [*names, "approved apps"], strict=True):
        assert line.startswith(f"ok     {name}: ")
    (site / "site.key").unlink()
    code, out, _ = fedssl("doctor", "--consortium", str(site), columns=400)
    assert code == 1
    told = f"to do  site's key: {site / 'site.key'} is missing\n       make it: fedssl provision request {site}\n"
    assert told in out


# The server


def test_a_server_that_does_not_listen_is_told(folder, site, server):
    server.close()
    check = by_name(site)["server"]
    assert f"localhost:{server.port} is not reached" in check.finding
    assert "check that the server runs" in check.advice


@pytest.mark.parametrize(("ahead", "expected"), [(60, "60 s behind the server's"), (-60, "60 s ahead of the server's")])
def test_a_wrong_clock_is_told(ahead, expected, folder, site, server):
    server.seconds_ahead = ahead
    server.start(folder / "server")
    check = by_name(site)["clock"]
    assert check.finding in (expected, expected.replace("60", "59"), expected.replace("60", "61"))
    assert "set it with a time service (NTP)" in check.advice


@pytest.mark.parametrize(
    ("issuer", "days", "finding", "advice"),
    [
        ("other", 100, "is refused: ", "start nothing: this may not be your server"),
        ("authority", 10, "issued by your authority; valid for 9 days", "ask the coordinator to renew it"),
    ],
)
def test_the_certificate_of_another_authority_and_one_that_ends_soon_are_told(
    issuer, days, finding, advice, folder, site, server
):
    (folder / issuer).mkdir(exist_ok=True)
    key = server_key(folder / "server" / "server.key").public_key()
    issued = Authority(folder / issuer, "our-consortium").issue(key, "localhost", days)
    (folder / "server" / "server.crt").write_bytes(issued.public_bytes(Encoding.PEM))
    server.start(folder / "server")
    check = by_name(site)["server's certificate"]
    assert finding in check.finding
    assert advice in check.advice


# The site

NO_PEM, NO_KEY = "ca.crt is not a certificate in PEM format", "is not a private key"
STEPS = "see STEPS.md; a key is made with fedssl provision request"
ANY_APP = "add approved_apps to site.yaml, so that a server that was taken over cannot send other code"
DRIVER = "install the GPU's driver and a PyTorch with CUDA, or change device in site.yaml"
OWN_NUMBER = "set client: 0: the server refuses another number"
NOWHERE = {"name": "npz", "path": "nowhere.npz"}


@pytest.mark.parametrize(
    ("damage", "what", "finding", "advice"),
    [
        ({"ca.crt": "x"}, "authority", NO_PEM, "ask the coordinator for ca.crt again"),
        ({"site.key": "x"}, "site's key", NO_KEY, STEPS),
        (
            {"data": NOWHERE},
            "data",
            "nowhere.npz",
            "link your images (ln -s FOLDER images), or change data in site.yaml",
        ),
        ({"device": "cuda:0"}, "device", "cuda:0; this machine has ", None if torch.cuda.is_available() else DRIVER),
        ({"approved_apps": None}, "approved apps", "every app that the server sends runs here", ANY_APP),
        ({"client": 1}, "site.yaml", "client is 1, but hospital-a is client 0 of our-consortium", OWN_NUMBER),
        ({"approved_apps": ["12"]}, "site.yaml", "approved_apps", "correct site.yaml"),
    ],
)
def test_what_is_wrong_at_the_site_is_told(damage, what, finding, advice, site, server):
    server.close()
    for name, value in damage.items():
        if "." in name:
            (site / name).write_text(value)
        else:
            change(site, **{name: value})
    check = by_name(site)[what]
    assert finding in check.finding
    assert check.advice == advice


def test_a_key_that_others_can_read_and_a_full_disk_are_told_and_own_data_are_counted(site, server, monkeypatch):
    """The data from where the start script runs."""
    server.close()
    (site / "site.key").chmod(0o644)
    monkeypatch.setattr(site_check, "_LEAST_DISK", 2**62)
    np.savez(site / "own.npz", train_images=np.zeros((12, 3, 8, 8), dtype=np.uint8))
    change(site, data={"name": "npz", "path": "own.npz"}, approved_apps=["0" * 64])
    checks = by_name(site)
    assert checks["site's key"].advice == f"chmod 600 {site / 'site.key'}"
    assert checks["disk"].advice == "free some space, or choose another state folder"
    assert checks["data"] == Check("data", "12 training images", None)
    assert checks["approved apps"] == Check("approved apps", "1 in site.yaml; others need --allow")


def test_of_the_servers_folder_the_sites_are_shown(folder, monkeypatch):
    """By name, without those that were revoked; a site that is not connected is something to do."""
    times = {"registered_at": "2026-01-01T08:00:00+00:00", "last_activated_at": "2026-01-02T10:00:00+01:00"}
    nodes = [
        NodeInfo(name="d", status="unregistered", **times),
        NodeInfo(name="c", status="offline", registered_at=times["registered_at"]),
        NodeInfo(name="b", status="offline", online_until=1767348000.0, **times),
        NodeInfo(name="a", status="offline", last_deactivated_at="2026-01-02T09:30:00+00:00", **times),
        NodeInfo(node_id=7, status="online", **times),
    ]
    monkeypatch.setattr(registered_keys.ControlHttpClient, "ListNodes", lambda *_: ListNodesResponse(nodes_info=nodes))
    assert {(what, finding): advice is None for what, finding, advice in check_site(folder / "server")} == {
        ("node 7", "connected since 2026-01-02 09:00:00 UTC"): True,
        ("a", "not connected since 2026-01-02 09:30:00 UTC"): False,
        ("b", "not connected since 2026-01-02 10:00:00 UTC"): False,
        ("c", "never connected; its key was registered 2026-01-01 08:00:00 UTC"): False,
    }


def test_a_server_that_does_not_run_is_told(folder):
    with pytest.raises(UserError, match=r"start it with start\.sh, and call this on its machine"):
        check_site(folder / "server")
