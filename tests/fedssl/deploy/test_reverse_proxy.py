"""The nginx in front of the SuperLink: its configuration, and the start script that keeps it alive.

In test_start_scripts.py sites train through it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from fedssl.deploy.reverse_proxy import write_reverse_proxy
from fedssl.errors import UserError
from tests.fedssl.engines.flower.deployment import free_port, make_authority, missing_tools, poll


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
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


# The start script, with a stand-in for each command

#: like nginx, which starts a worker; all write their process ids
NGINX = '#!/bin/sh\nsleep 1000 &\necho "$! $$" >> nginx.pids\nwait\n'
BROKEN_NGINX = "#!/bin/sh\necho broken >> nginx.pids\nexit 1\n"
FEDSSL = '#!/bin/sh\n[ "$1" = superlink ] || exit 0\necho $$ > superlink.pids\nexec sleep 1000\n'


@pytest.fixture
def start(provisioned, tmp_path) -> Iterator[Callable[[str], subprocess.Popen]]:
    """Start the server's script with a stand-in for nginx."""
    server, commands, started = provisioned() / "server", tmp_path / "bin", []

    def run(nginx: str) -> subprocess.Popen:
        commands.mkdir()
        for name, text in (("nginx", nginx), ("fedssl", FEDSSL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o700)
        path = f"{commands}:{os.environ.get('PATH', os.defpath)}"
        with open(server / "log", "w") as log:
            process = subprocess.Popen(["./start.sh"], cwd=server, env=os.environ | {"PATH": path}, stderr=log)
        started.append(process)
        return process

    yield run
    for process in started:
        process.terminate()
        process.wait()
    for pid in (pid for name in ("nginx", "superlink") for pid in processes(server, name)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(server: Path, name: str) -> list[int]:
    """The process ids that a stand-in wrote and that still run."""
    file = server / f"{name}.pids"
    pids = [int(word) for word in file.read_text().split() if word.isdigit()] if file.exists() else []
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return [pid for pid, stat in zip(pids, states, strict=True) if stat.exists() and ") Z" not in stat.read_text()]


def test_a_reverse_proxy_that_cannot_start_ends_the_server(start, provisioned):
    server = provisioned() / "server"
    assert start(BROKEN_NGINX).wait() == 1
    assert (server / "nginx.pids").read_text().split() == ["broken"] * 6
    assert "has ended 5 times and is not started again: see nginx.log" in (server / "log").read_text()
    assert processes(server, "superlink") == []


def test_a_killed_reverse_proxy_starts_again_without_its_old_workers_and_ends_with_the_superlink(start, provisioned):
    server = provisioned() / "server"
    script, first = start(NGINX), []

    def starts() -> bool:
        running = processes(server, "nginx")
        return len(running) == 2 and not set(running) & set(first) and processes(server, "superlink") != []

    poll(starts, "both start")
    first += processes(server, "nginx")
    os.kill(first[1], signal.SIGKILL)  # the worker comes first
    poll(starts, "the reverse proxy starts again, and its old worker has ended")
    os.kill(*processes(server, "superlink"), signal.SIGTERM)
    assert script.wait() != 0
    poll(lambda: processes(server, "nginx") == [], "all have ended")
