"""The configuration of the nginx in front of the SuperLink; test_hostile_site.py has sites train through it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from fedssl.deploy.reverse_proxy import write_reverse_proxy
from fedssl.errors import UserError
from tests.fedssl.engines.flower.deployment import free_port, make_authority, missing_tools


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_nginx_accepts_the_configuration(host, tmp_path):
    folder = tmp_path / "a folder {with} #signs;"
    make_authority(folder)
    path = write_reverse_proxy(folder, free_port(), host, 8001)
    done = subprocess.run(["nginx", "-t", "-c", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr


@pytest.mark.parametrize(
    ("folder", "port", "host", "message"),
    [
        ("a", 8000, "0.0.0.0", "the SuperLink must listen on this machine alone, but --host is 0.0.0.0"),
        ("a", 8000, "fed.example.org", "on this machine alone, but --host is fed.example.org"),
        ("a", 8001, "127.0.0.1", "--reverse-proxy and --port are both 8001: give the reverse proxy a port of its own"),
        ("$a", 8000, "127.0.0.1", r"nginx cannot read the folder's name '.*\$a': use one without quotes"),
    ],
)
def test_a_reverse_proxy_that_would_not_protect_is_refused(folder, port, host, message, tmp_path):
    (tmp_path / folder).mkdir()
    with pytest.raises(UserError, match=message):
        write_reverse_proxy(tmp_path / folder, port, host, 8001)
    assert not list((tmp_path / folder).iterdir())
