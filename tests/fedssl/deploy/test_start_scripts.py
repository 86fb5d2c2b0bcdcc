"""A consortium of two sites with images of their own from an empty folder to a finished run, as docs/deploy.md says.

The commands are the page's. The reverse proxy in front of the SuperLink; TLS and registered keys; sites that run
approved apps alone; and a site that is revoked while the server runs. Also the reverse proxy alone, and how it is kept
alive.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
import yaml
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

from fedssl.run_folder.record import read_run
from fedssl.templates import fill_template
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.flower.deployment import (
    MARK,
    free_port,
    is_listening,
    kill_marked,
    make_authority,
    marked,
    needs_proc,
    poll,
    read_logs,
    run_flwr,
    with_package,
)

PAGE = Path(__file__).parents[3] / "docs" / "deploy.md"
NGINX_PROGRAM = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX_PROGRAM is None, reason="nginx is not installed: apt-get install nginx-light")

#: the operator's interface, also written so that it may look like the sites' to one of the two servers that read it
OPERATORS = (
    *(f"/v1/control/{name}" for name in ("start-run", "stop-run", "stream-logs", "register-node", "unregister-node")),
    "/v1/control/list-runs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "//v1/control/list-runs",
    "/V1/fleet/../control/list-runs",
    "/v1/runtime/acquire-task",
    "/docs",
)


def post(port: int, certificate: Path, path: str, size: int = 0, headers: dict[str, str] | None = None) -> int:
    """The HTTP status of a request of `size` bytes to a path, which is sent as it stands; 0 where none came."""
    with httpx.Client(verify=ssl.create_default_context(cafile=certificate), timeout=60) as client:
        url = httpx.URL(f"https://localhost:{port}").copy_with(raw_path=path.encode())
        with contextlib.suppress(httpx.TransportError):
            return client.post(url, content=bytes(size), headers=headers).status_code
    return 413 if size else 0  # a connection may be closed before the answer to a long body can be read


def end_by_sigterm_with_parent() -> None:
    """As a start script ends what it has started when it is terminated, but not when it is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


#: `fedssl`, which waits longer: on a busy machine Flower takes a process that has not started within 30 s for dead, and
#: ends a run whose request finds the database locked for 5 s. No recipe here needs timm, which takes long to import.
PATIENT_FEDSSL = """
from flwr.common import constant
from flwr.supercore import constant as database

constant.HEARTBEAT_DEFAULT_INTERVAL = 600  # seconds
database.SQLITE_PRAGMAS = (*database.SQLITE_PRAGMAS, ("busy_timeout", "600000"))  # milliseconds

from fedssl.cli import main
from fedssl.deploy import nodes

nodes._APP_MODULES = tuple(name for name in nodes._APP_MODULES if name != "timm")
main()
"""


class Members:
    """The coordinator, the server and the sites on one machine; only start scripts call `fedssl` as a process."""

    def __init__(self, folder: Path, fedssl: Callable[..., tuple[int, str, str]]):
        self.folder, self._fedssl = folder, fedssl
        self.consortium = folder / "consortium"
        self.port, self.internal_port = free_port(), free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        commands = folder / "bin"
        commands.mkdir()
        for name, code in (("fedssl", PATIENT_FEDSSL), ("flwr", "from flwr.cli.app import app\napp()")):
            (commands / name).write_text(f"#!{sys.executable}\n{code}\n")
            (commands / name).chmod(0o700)
        variables = {"PATH": f"{commands}:{os.environ.get('PATH', os.defpath)}", "OMP_NUM_THREADS": "1"}
        self.environment = with_package() | variables | {MARK: f"{folder}/", "FLWR_HOME": str(folder / "home")}

    def fedssl(self, *arguments: str) -> str:
        code, out, err = self._fedssl(*arguments)
        assert code == 0, out + err + self.logs()
        return out

    def start(self, member: str, command: str) -> None:
        with open(self.log(member), "ab") as log:
            self.processes[member] = subprocess.Popen(
                shlex.split(command),
                cwd=self.consortium / member,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_by_sigterm_with_parent,
            )

    def approve(self, site: str, digest: str) -> None:
        path = self.consortium / site / "site.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"approved_apps": [digest]}))

    def flwr(self, *arguments: str) -> dict:
        return run_flwr(self.consortium / "server" / "flower", *arguments)

    def status(self, run: str) -> str:
        return str(self.flwr("list", "consortium", "--run-id", run)["runs"][0]["status"])

    def wait_for(self, member: str, text: str) -> None:
        """Wait until a member has printed a text."""

        def has_printed() -> bool:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, f"{ended} ended before {member} printed {text!r}\n{self.logs()}"
            return text in self.log(member).read_text(errors="replace")

        poll(has_printed, f"{member} prints {text!r}")

    def log(self, member: str) -> Path:
        return self.folder / f"{member}.log"

    def logs(self) -> str:
        return read_logs(self.folder)

    def stop(self) -> None:
        """As Ctrl-C or systemd stops the start scripts."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.processes.values():
            process.wait()
        self.processes.clear()


@pytest.fixture
def members(tmp_path, fedssl) -> Iterator[Members]:
    made = Members(tmp_path, fedssl)
    yield made
    made.stop()
    kill_marked(f"{tmp_path}/")


def require_reverse_proxy(members: Members, run: str) -> None:
    """No site reaches the operator's interfaces, not even when nginx has been killed and starts again.

    The same requests are answered at the SuperLink's own port, which listens on this machine alone.
    """
    certificate = members.consortium / "hospital-a" / "ca.crt"

    def require_refusals() -> None:
        assert {post(members.port, certificate, path) for path in OPERATORS} == {403}
        assert post(members.port, certificate, "/v1/fleet/push-object", 9) == 401  # without a site's key
        assert post(members.port, certificate, "/v1/fleet/push-object", 2**25) == 413
        assert members.status(run) == "running"

    require_refusals()
    os.kill(int((members.consortium / "server" / "nginx.pid").read_text()), signal.SIGKILL)
    members.wait_for("server", "the reverse proxy (nginx) has ended and is started again")
    # a worker that was killed holds the port for a moment, and does not answer
    poll(lambda: post(members.port, certificate, "/docs") != 0, "the reverse proxy answers again")
    require_refusals()
    others = {"127.0.0.2", "::1", socket.gethostbyname(socket.gethostname())} - {"127.0.0.1"}
    assert not any(is_listening(members.internal_port, address) for address in others)
    assert {0, 403}.isdisjoint(post(members.internal_port, certificate, path) for path in OPERATORS[:6])


def short_way() -> list[str]:
    """The indented lines of the section, in their order."""
    section = PAGE.read_text(encoding="utf-8").split("\n## The short way\n")[1].split("\n## ")[0]
    return [line.strip() for line in section.splitlines() if line.startswith("    ")]


def next_command(printed: str) -> str:
    [line] = [line for line in printed.splitlines() if line.startswith("Next: ")]
    return line.rpartition(": ")[2]


@needs_proc
@needs_nginx
@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here")
def test_the_short_way_from_an_empty_folder_to_a_finished_run_of_two_sites(members):
    example, provision, server, link, site, *_ = short_way()
    # the coordinator
    assert example == "fedssl provision --example > consortium.yaml"
    text = members.fedssl("provision", "--example")
    assert provision in text
    for example, port in (("port: 8000", members.port), ("internal_port: 8001", members.internal_port)):
        text = re.sub(rf"\b{example}\b", example.split()[0] + f" {port}", text)
    (members.folder / "consortium.yaml").write_text(text)
    assert next_command(members.fedssl(*shlex.split(provision)[1:])) == server

    # the server
    members.start("server", server)
    members.wait_for("server", "Next: at each site")
    members.wait_for("server", "new:     hospital-b, client 1, key SHA256:")
    following = next_command(members.log("server").read_text())
    digest = following.split()[-1]
    assert following == site.replace("DIGEST", digest)
    members.wait_for("server", "Successfully started run ")
    [run] = re.findall(r"Successfully started run (\d+)", members.log("server").read_text())

    # the sites, one with grey images: one approves the app, the other one has approved another app
    for name, colours in (("hospital-a", [3]), ("hospital-b", [])):
        images = members.folder / f"images of {name}"
        images.mkdir()
        for number, pixels in enumerate(random_pixels(60, 40, 48, *colours)):
            save_array(images / f"{number}.png", pixels)
        command = link.replace("FOLDER-OF-IMAGES", shlex.quote(str(images)))
        subprocess.run(command, shell=True, cwd=members.consortium / name, check=True)
    poll(lambda: is_listening(members.port), "the reverse proxy listens")
    folder = members.consortium / "hospital-a"
    [check] = re.findall("`(curl .*)` must answer", (folder / "STEPS.md").read_text())
    if shutil.which("curl") is not None:
        reached = subprocess.run(shlex.split(check), cwd=folder, capture_output=True, text=True)
        assert "403 Forbidden" in reached.stdout
        assert "\nDate: " in reached.stdout
    members.start("hospital-a", site.replace("DIGEST", digest))
    members.start("hospital-b", site.replace("DIGEST", "0" * 64))
    members.wait_for("hospital-b", f"the app has the digest {digest}, and the approved digest is {'0' * 64}")
    assert members.status(run) == "running"
    assert not list(members.consortium.glob("hospital-b/state/*"))

    def connected() -> list[str]:
        printed = members.fedssl("provision", "register", "consortium/server")
        return re.findall("^in: +(.*), client .*: online, connected at ", printed, re.MULTILINE)

    # the first site may connect after the second one has refused the app
    poll(lambda: connected() == ["hospital-a", "hospital-b"], "both sites are connected", pause=0.5)
    require_reverse_proxy(members, run)
    members.approve("hospital-b", digest)  # while it runs
    poll(lambda: members.status(run).startswith("finished"), "the run ends", pause=0.5)
    assert members.status(run) == "finished:completed", members.logs()
    finished = read_run(members.consortium / "server" / "runs" / "fedbyol-seed0")
    assert (finished.last_round, finished.class_counts, finished.refused) == (2, [[60], [60]], [])
    members.wait_for("server", "Next: fedssl report runs/fedbyol-seed0")
    for name in ("hospital-a", "hospital-b"):
        for told in ("its 60 images of 3 x 64 x 64 fit", "trained round 2 on 60 images: loss ", "MB: weights; the num"):
            assert told in members.log(name).read_text(), told

    # the coordinator revokes a site
    printed = members.fedssl("provision", "register", "consortium/server")
    assert re.sub(" key SHA256:.*", "", printed) == "in:      hospital-a, client 0,\nin:      hospital-b, client 1,\n"
    members.fedssl("provision", "revoke", "hospital-b")
    printed = members.fedssl("provision", "register", "consortium/server")
    told = [("no key", "hospital-b"), ("out", "hospital-b"), ("in", "hospital-a")]
    assert re.findall("^([a-z ]+): +([a-z-]+),", printed, re.MULTILINE) == told
    poll(lambda: members.processes["hospital-b"].poll() is not None, "the revoked site is shut out and ends")
    assert "the server does not accept this site" in members.log("hospital-b").read_text(errors="replace")
    assert members.processes["hospital-a"].poll() is None

    members.stop()
    poll(lambda: not marked(f"{members.folder}/"), "everything that the start scripts started has ended")
    assert not is_listening(members.port)
    assert not is_listening(members.internal_port)


# The configuration of nginx


#: the site's, as it shows it
KEY = b64encode(public_key_to_bytes(generate_key_pairs()[1])).decode()


class Proxied:
    """An nginx, before a server that answers 200, or as it is asked to, as soon as it has a body."""

    def __init__(self, folder: Path):
        self.folder, self.authority, self.port, self.inner = folder, folder / "ca.crt", free_port(), free_port()
        make_authority(folder)
        server = {"port": self.port, "superlink": f"127.0.0.1:{self.inner}"}
        (folder / "nginx.conf").write_text(fill_template("fedssl.deploy", "nginx.conf.jinja", server=server))
        (folder / "nginx.sites").write_text(f'"{KEY}" hospital-a;\n')
        self.nginx = [NGINX_PROGRAM, "-p", str(folder), "-c", "nginx.conf"]

    def fleet(self, size: int = 9, **headers: str) -> int:
        """The HTTP status of a site's request."""
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        return post(self.port, self.authority, "/v1/fleet/push-object", size, names)

    @contextlib.contextmanager
    def connection(self) -> Iterator[ssl.SSLSocket]:
        context = ssl.create_default_context(cafile=self.authority)
        with (
            socket.create_connection(("localhost", self.port), timeout=60) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as connection,
        ):
            yield connection


def head(key: str) -> bytes:
    """A request without its end."""
    return f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: a\r\nflwr-public-key: {key}\r\n".encode()


@pytest.fixture
def proxied(request, tmp_path) -> Iterator[Proxied]:
    """It has accepted its configuration in a folder of an odd name; its waits may be parameters."""

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        status = int(dict(scope["headers"]).get(b"wanted", 200))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    made = Proxied(tmp_path / "a folder {with} #signs;")
    path = made.folder / "nginx.conf"
    for before, after in getattr(request, "param", {}).items():
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))
    checked = subprocess.run([*made.nginx, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr
    files = {"ssl_certfile": made.folder / "server.crt", "ssl_keyfile": made.folder / "server.key"}
    server = uvicorn.Server(uvicorn.Config(app, port=made.inner, ws="none", lifespan="off", log_level="error", **files))
    thread = threading.Thread(target=server.run)
    thread.start()
    poll(lambda: server.started, "the server listens")
    nginx = subprocess.Popen([*made.nginx, "-g", "daemon off;"])
    poll(lambda: is_listening(made.port), "nginx listens")
    yield made
    nginx.terminate()
    nginx.wait()
    server.should_exit = True
    server.force_exit = True
    thread.join()


@needs_nginx
@pytest.mark.parametrize("proxied", [{"client_body_timeout 10s": "client_body_timeout 600s"}], indirect=True)
def test_slow_posts_without_a_sites_key_are_refused_and_those_of_a_site_do_not_cut_off_another(proxied):
    """They say no key, a short one, a stranger's, or the site's; all come from one address."""
    stranger, other = (b64encode(public_key_to_bytes(generate_key_pairs()[1])).decode() for _ in range(2))
    with (proxied.folder / "nginx.sites").open("a") as sites:
        sites.write(f'"{other}" hospital-b;\n')
    os.kill(int((proxied.folder / "nginx.pid").read_text()), signal.SIGHUP)
    poll(lambda: proxied.fleet(flwr_public_key=other) == 200, "nginx has read the keys anew")
    begun = b"content-length: 9\r\n\r\n."
    for key in ("", "short", stranger, KEY[:-4]):
        with proxied.connection() as connection:
            connection.sendall(head(key) + begun)
            assert connection.recv(2**16).startswith(b"HTTP/1.1 401")
    with contextlib.ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(proxied.connection()).sendall(head(KEY) + begun)
        poll(lambda: proxied.fleet(flwr_public_key=KEY) == 503, "the site has all its connections")
        assert proxied.fleet(flwr_public_key=other) == 200
    assert proxied.fleet(2**25, flwr_public_key=other) == 413


@needs_nginx
def test_after_an_error_of_the_superlink_a_site_is_told_to_try_again(proxied):
    """Flower's clients do so after 502 and 503 alone; a refusal stays one."""
    for status, told in ((500, 503), (504, 503), (507, 503), (400, 400), (401, 401)):
        assert proxied.fleet(flwr_public_key=KEY, wanted=str(status)) == told


@needs_nginx
@pytest.mark.parametrize(
    "proxied",
    [{"header_timeout 10s": "header_timeout 1s", "keepalive_timeout 15s": "keepalive_timeout 2s"}],
    indirect=True,
)
def test_connections_without_a_request_and_headers_that_do_not_end_are_ended(proxied):
    """From the start, and after a request that was answered."""
    whole = head(KEY) + b"content-length: 0\r\n\r\n"
    for first, then in ((b"", b""), (b"", head(KEY)), (whole, b""), (whole, head(KEY))):
        with proxied.connection() as connection:
            connection.sendall(first)
            assert not first or connection.recv(2**16).startswith(b"HTTP/1.1 200")
            connection.sendall(then)
            assert connection.recv(1) == b""


# The server's start script, with a stand-in for each command

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
            started.append(subprocess.Popen(["./start.sh"], cwd=server, env=os.environ | {"PATH": path}, stderr=log))
        return started[-1]

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
    assert "was started again 5 times and has ended again: see nginx.log" in (server / "log").read_text()
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
