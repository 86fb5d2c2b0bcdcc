"""`fedssl doctor --consortium`: a line for everything that a site needs, and what to do where something is wrong."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from cryptography.hazmat.primitives.serialization import Encoding

from fedssl.deploy import site_check
from fedssl.deploy.certificates import Authority
from fedssl.deploy.keys import server_key
from fedssl.deploy.site_check import Check, check_site
from fedssl.errors import UserError
from tests.fedssl.cli.conftest import fedssl  # noqa: F401 - a fixture

DIGEST = "0" * 64


class Server:
    """An HTTPS server on this machine, whose certificate and clock can be set."""

    def __init__(self) -> None:
        self.seconds_ahead = 0.0
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
        self.port: int = self._http.server_address[1]

    def start(self, folder: Path) -> None:
        """Serve with server.crt and server.key of a folder."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self._http.socket = self._context.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        self._http.handle_error = lambda request, address: None
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        if hasattr(self, "_context"):
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
    return provisioned(server={"address": "localhost", "port": server.port, "wall": False})


@pytest.fixture
def site(folder) -> Path:
    return folder / "hospital-a"


@pytest.fixture
def change(site) -> Callable[..., None]:
    """Change the site's file."""

    def write(**changes) -> None:
        path = site / "site.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))

    return write


def by_name(site: Path) -> dict[str, Check]:
    return {check.what: check for check in check_site(site)}


def test_where_all_is_well_every_line_is_ok(folder, site, server):
    server.start(folder / "server")
    checks = check_site(site)
    assert [check.what for check in checks] == [
        "authority", "site's key", "server", "clock", "server's certificate", "device", "data", "disk", "approved apps",
    ]  # fmt: skip
    assert [check for check in checks if check.advice is not None] == []


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


def test_the_certificate_of_another_authority_is_told(folder, site, server):
    other = folder.parent / "other"
    other.mkdir()
    stranger = Authority(other, "other")
    issued = stranger.issue(server_key(folder / "server" / "server.key").public_key(), "localhost", 100)
    (folder / "server" / "server.crt").write_bytes(issued.public_bytes(Encoding.PEM))
    server.start(folder / "server")
    check = by_name(site)["server's certificate"]
    assert "is refused: " in check.finding
    assert "start nothing: this may not be your server" in check.advice


def test_a_certificate_that_ends_soon_is_told(folder, site, server):
    authority = Authority(folder / "authority", "our-consortium")
    issued = authority.issue(server_key(folder / "server" / "server.key").public_key(), "localhost", 10)
    (folder / "server" / "server.crt").write_bytes(issued.public_bytes(Encoding.PEM))
    server.start(folder / "server")
    check = by_name(site)["server's certificate"]
    assert check.finding == "issued by your authority; valid for 9 days"
    assert check.advice == "ask the coordinator to renew it"


def test_a_damaged_authority_and_a_key_that_is_missing_or_open_to_others_are_told(site, server):
    server.close()
    key = site / "site.key"
    key.chmod(0o644)
    assert by_name(site)["site's key"].advice == f"chmod 600 {key}"
    key.unlink()
    assert by_name(site)["site's key"].advice == f"make it: fedssl provision request {site}"
    key.write_text("nonsense")
    assert "is not a private key" in by_name(site)["site's key"].finding
    (site / "ca.crt").write_text("nonsense")
    check = by_name(site)["authority"]
    assert "ca.crt is not a certificate in PEM format" in check.finding
    assert check.advice == "ask the coordinator for ca.crt again"


def test_data_that_cannot_be_read_are_told(site, server, change):
    server.close()
    change(data={"name": "npz", "path": "nowhere.npz"})
    check = by_name(site)["data"]
    assert "nowhere.npz" in check.finding
    assert check.advice == "change data in site.yaml"


def test_own_data_are_counted_where_the_start_script_would_find_them(site, server, change):
    import numpy as np

    server.close()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (12, 3, 8, 8), dtype=np.uint8)
    np.savez(site / "own.npz", train_images=images)
    change(data={"name": "npz", "path": "own.npz"})
    check = by_name(site)["data"]
    assert check == Check("data", "12 training images", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told(site, server, change):
    server.close()
    change(device="cuda:0")
    check = by_name(site)["device"]
    assert check.finding == "cuda:0; this machine has no GPU"
    assert "install the GPU's driver" in check.advice


def test_a_full_disk_is_told(site, server, monkeypatch):
    server.close()
    monkeypatch.setattr(site_check, "_LEAST_DISK", 2**62)
    assert by_name(site)["disk"].advice == "free some space, or choose another state folder"


def test_a_site_that_runs_every_app_is_told(site, server, change):
    server.close()
    change(approved_apps=[DIGEST])
    assert by_name(site)["approved apps"] == Check("approved apps", "1 in site.yaml; others need --allow or --ask")
    change(approved_apps=None)
    check = by_name(site)["approved apps"]
    assert check.finding == "every app that the server sends runs here"
    assert "add approved_apps to site.yaml" in check.advice


def test_a_wrong_site_file_is_told(site, server, change):
    server.close()
    change(approved_apps=["12"])
    check = check_site(site)[-1]
    assert check.what == "site.yaml"
    assert "approved_apps" in check.finding
    assert check.advice == "correct site.yaml"


def test_the_servers_folder_is_refused(folder):
    with pytest.raises(UserError, match="is the server's folder: fedssl doctor --consortium checks a site's folder"):
        check_site(folder / "server")


def test_the_command_prints_a_line_for_each_check_and_what_to_do(folder, site, server, fedssl):  # noqa: F811
    server.start(folder / "server")
    code, out, _ = fedssl("doctor", "--consortium", str(site), columns=400)
    assert code == 0, out
    assert all(line.startswith("ok     ") for line in out.splitlines())
    (site / "site.key").unlink()
    code, out, _ = fedssl("doctor", "--consortium", str(site), columns=400)
    assert code == 1
    assert (
        f"to do  site's key: {site / 'site.key'} is missing\n       make it: fedssl provision request {site}\n" in out
    )
