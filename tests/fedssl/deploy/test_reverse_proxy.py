"""The nginx in front of the SuperLink: its configuration, and the start script that keeps it alive.

In engines/flower/test_deployment.py sites train through it.
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


# The start script, with a stand-in for each command

#: like nginx, which starts a worker; both write their process ids
NGINX = """\
#!/bin/sh
sleep 1000 &
echo "$! worker" >> started
echo "$$ master" >> started
wait
"""
BROKEN_NGINX = "#!/bin/sh\necho broken >> started\nexit 1\n"
FEDSSL = '#!/bin/sh\n[ "$1" = superlink ] || exit 0\necho $$ > superlink.pid\nexec sleep 1000\n'


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
    for pid in processes(server):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(server: Path, kind: str = "") -> list[int]:
    """The process ids that the stand-ins wrote, in the order of their starts."""
    lines = (server / "started").read_text().splitlines() if (server / "started").exists() else []
    lines += (server / "superlink.pid").read_text().splitlines() if not kind and is_started(server) else []
    return [int(line.split()[0]) for line in lines if line.endswith(kind) and line[0].isdigit()]


def is_started(server: Path) -> bool:
    return (server / "superlink.pid").exists() and bool((server / "superlink.pid").read_text())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_reverse_proxy_that_is_killed_is_started_again_without_its_old_workers(start, provisioned):
    server = provisioned() / "server"
    script = start(NGINX)
    poll(lambda: len(processes(server, "master")) == 1, "the reverse proxy starts")
    [master], [worker] = processes(server, "master"), processes(server, "worker")
    os.kill(master, signal.SIGKILL)
    poll(lambda: len(processes(server, "master")) == 2, "the reverse proxy starts again")
    poll(lambda: not runs(worker), "its old worker has ended")
    assert "the reverse proxy (nginx) has ended and is started again" in (server / "log").read_text()
    script.terminate()
    assert script.wait() == 143
    poll(lambda: not any(map(runs, processes(server))), "all have ended")


def test_a_reverse_proxy_that_cannot_start_ends_the_server(start, provisioned):
    server = provisioned() / "server"
    assert start(BROKEN_NGINX).wait() == 1
    assert (server / "started").read_text().split() == ["broken"] * 6
    assert (
        "has ended 5 times and is not started again: see nginx.log; the server ends too" in (server / "log").read_text()
    )
    assert not any(map(runs, processes(server)))


def test_when_the_superlink_ends_the_reverse_proxy_ends_too(start, provisioned):
    server = provisioned() / "server"
    script = start(NGINX)
    poll(lambda: len(processes(server, "master")) == 1, "the reverse proxy starts")
    [superlink] = [int(line) for line in (server / "superlink.pid").read_text().split()]
    os.kill(superlink, signal.SIGTERM)
    assert script.wait() != 0
    poll(lambda: not any(map(runs, processes(server))), "all have ended")
