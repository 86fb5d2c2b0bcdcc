"""`fedssl provision register`: who is in, new, out or refused, with a stand-in for the SuperLink's registry."""

import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedssl.deploy import registered_keys
from fedssl.deploy.folders import revoke
from fedssl.deploy.registered_keys import register_keys
from fedssl.errors import UserError

SITES = ["hospital-a", "hospital-b", "hospital-c"]


class Registry:
    """Nodes as a SuperLink keeps them: an unregistered key stays, and is not registered again."""

    def __init__(self):
        self.nodes: list[SimpleNamespace] = []

    def ListNodes(self, request):
        return SimpleNamespace(nodes_info=list(self.nodes))

    def RegisterNode(self, request):
        assert request.public_key not in [node.public_key for node in self.nodes]
        known = {"name": request.name, "status": "registered", "last_activated_at": "", "node_id": len(self.nodes)}
        self.nodes.append(SimpleNamespace(public_key=request.public_key, **known))

    def UnregisterNode(self, request):
        self.nodes[request.node_id].status = "unregistered"


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def register(monkeypatch, registry) -> Callable[[Path], list[tuple[str, str]]]:
    """Register a server's keys; gives the first word of each line and the site or file that it names."""

    @contextmanager
    def connect(*arguments, **options):
        yield registry

    monkeypatch.setattr(registered_keys, "ControlHttpClient", SimpleNamespace(from_server_address=connect))

    def call(server: Path) -> list[tuple[str, str]]:
        lines = register_keys(server / "sites", "h:1", server / "ca.crt")
        assert all(re.search("client [0-9]|key SHA256:|^warning: ", line) for line in lines)
        return [(line.partition(":")[0], re.findall(r"[a-z-]+(?=,)|[a-z-]+\.pub|$", line)[0]) for line in lines]

    return call


def test_each_site_is_told_and_the_key_of_a_revoked_one_in_a_copied_folder_is_refused(provisioned, register):
    """The accident: sites/ is copied over the server's old folder, where the revoked key's file stays."""
    folder = provisioned(sites=SITES)
    server = folder / "server"
    left_over = (server / "sites" / "hospital-b.pub").read_bytes()
    assert register(server) == [("new", site) for site in SITES]
    assert register(server) == [("in", site) for site in SITES]
    revoke("hospital-b", folder)
    (server / "sites" / "hospital-b.pub").write_bytes(left_over)
    others = [("in", "hospital-a"), ("in", "hospital-c")]
    assert [line.split()[1] for line in (server / "nginx.sites").read_text().splitlines()] == [f"{s};" for s in SITES]
    refused = [("refused", "hospital-b.pub"), ("no key", "hospital-b")]
    assert register(server) == [*refused, ("out", "hospital-b"), *others]
    assert register(server) == [*refused, *others]
    passed = (server / "nginx.sites").read_text().splitlines()  # by the reverse proxy
    assert [line.split()[1] for line in passed] == ["hospital-a;", "hospital-c;"]
    (server / "sites" / "hospital-b.pub").rename(server / "sites" / "stranger.pub")
    assert register(server) == [("refused", "stranger.pub"), ("no key", "hospital-b"), *others]


@pytest.mark.parametrize(
    ("status", "activated", "told"),
    [
        ("registered", "", "never connected"),
        ("online", "2026-01-02T10:00:00+01:00", "online, connected at 2026-01-02 09:00:00 UTC"),
        ("offline", "2026-01-02T10:00:00+01:00", "offline, connected at 2026-01-02 09:00:00 UTC"),
    ],
)
def test_of_a_site_that_is_in_the_line_says_whether_it_is_connected(
    status, activated, told, provisioned, register, registry
):
    server = provisioned(sites=SITES[:1]) / "server"
    register(server)
    vars(registry.nodes[0]).update(status=status, last_activated_at=activated)
    [line] = register_keys(server / "sites", "h:1", server / "ca.crt")
    assert line.startswith("in:      hospital-a, client 0, key SHA256:")
    assert line.endswith(f": {told}")


def test_a_key_that_flower_has_unregistered_is_told(provisioned, register):
    server = provisioned(sites=SITES[:2]) / "server"
    register(server)
    manifest = server / "sites" / "manifest.yaml"
    text = manifest.read_text()
    manifest.write_text(re.sub("hospital-a: .*", "hospital-a: null", text))
    register(server)
    manifest.write_text(text)
    assert register(server) == [("refused", "hospital-a"), ("in", "hospital-b")]


def test_a_folder_that_is_not_whole_or_that_others_can_write_changes_nothing(provisioned, register):
    server = provisioned(sites=SITES) / "server"
    register(server)
    (server / "sites").chmod(0o707)
    with pytest.raises(UserError, match=r"cannot be used: other users can change it \(mode 0707\)"):
        register(server)
    (server / "sites").chmod(0o700)
    (server / "sites" / "hospital-b.pub").unlink()
    with pytest.raises(UserError, match=r"hospital-b\.pub is missing, but manifest\.yaml has its key: copy the whole"):
        register(server)
    (server / "sites" / "manifest.yaml").unlink()
    with pytest.raises(UserError, match=r"manifest of keys .* cannot be read .*fedssl provision writes it"):
        register(server)
