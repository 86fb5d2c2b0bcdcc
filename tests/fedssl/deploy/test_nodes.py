"""`fedssl superlink` and `fedssl supernode` refuse to start where something is wrong."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")


from fedssl.deploy import nodes
from fedssl.run_folder.creation import alone_in
from tests.fedssl.engines.flower.deployment import free_port, make_authority, missing_tools
from tests.fedssl.engines.flower.loop_grid import write_sites
from tests.fedssl.forked_command import start_command

needs_openssl = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def refused(folder: Path, *arguments: str) -> str:
    """What `fedssl` prints to standard error where it refuses its arguments."""
    errors = folder / "errors.txt"
    process = start_command([*arguments], errors)
    process.join()
    assert process.exitcode == 2, errors.read_text()
    return errors.read_text()


def test_the_commands_refuse_to_start_without_tls(tmp_path):
    assert "ca.crt does not exist: TLS needs it" in refused(tmp_path, "superlink", str(tmp_path))
    [site] = write_sites(tmp_path, 1)
    told = refused(tmp_path, "supernode", str(site), "--superlink", "127.0.0.1:1")
    assert "give --root-certificates and --key, or --insecure" in told


@needs_openssl
def test_a_certificate_that_flowers_own_processes_would_not_trust_is_refused(tmp_path):
    make_authority(tmp_path, names="DNS:fed.example.org,IP:10.0.0.1")
    told = refused(tmp_path, "superlink", str(tmp_path), "--host", "0.0.0.0")
    assert "server.crt is valid for 10.0.0.1, fed.example.org, but not for 127.0.0.1" in told
    (tmp_path / "server.crt").write_text("nonsense")
    assert "server.crt is not a certificate in PEM format" in refused(tmp_path, "superlink", str(tmp_path))


def test_a_site_whose_data_are_not_there_is_told_before_anything_starts(tmp_path):
    [site] = write_sites(tmp_path, 1, data={"name": "npz", "path": "nowhere.npz"})
    told = refused(tmp_path, "supernode", str(site), "--superlink", "127.0.0.1:1", "--insecure")
    assert "fedssl: warning: insecure: without TLS" in told
    assert "nowhere.npz" in told
    assert "SuperNode" not in told


def test_a_port_that_is_taken_and_a_folder_that_is_in_use_are_told(tmp_path):
    insecure = ("superlink", str(tmp_path), "--insecure")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        told = refused(tmp_path, *insecure, "--port", port)
    assert f"port {port} of 127.0.0.1 is in use, perhaps by another SuperLink" in told
    with alone_in(tmp_path):
        told = refused(tmp_path, *insecure, "--port", port)
    assert "another SuperLink keeps its database in this folder: stop it, or name another folder" in told
    told = refused(tmp_path, *insecure, "--host", "203.0.113.7")
    assert "cannot listen on port 8000 of 203.0.113.7" in told


@pytest.mark.parametrize("command", ["superlink", "supernode"])
def test_what_the_commands_write_is_for_their_user_alone(command, tmp_path, monkeypatch):
    def run(*arguments) -> int:
        (tmp_path / "written").touch()
        return 130

    monkeypatch.setattr(nodes, "run", run)
    monkeypatch.setattr(nodes, "import_module", lambda name: None)
    [site] = write_sites(tmp_path, 1)
    before = os.umask(0o022)
    try:
        if command == "superlink":
            assert nodes.superlink(tmp_path, "127.0.0.1", free_port(), insecure=True) == 130
        else:
            assert nodes.supernode(site, "127.0.0.1:1", None, None, insecure=True) == 130
            assert (tmp_path / "state0").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (1, 1), (130, 130)])
def test_a_supernode_that_ends_by_itself_names_the_key_and_the_clock(code, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nodes, "run", lambda *arguments: code)
    monkeypatch.setattr(nodes, "import_module", lambda name: None)
    [site] = write_sites(tmp_path, 1)
    assert nodes.supernode(site, "127.0.0.1:1", None, None, insecure=True) == expected
    said = capsys.readouterr().err
    assert ("the server does not accept this site" in said) == (code == 0)
    assert ("this machine's clock (" in said) == (code == 0)
