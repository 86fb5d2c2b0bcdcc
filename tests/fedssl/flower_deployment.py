"""A SuperLink and SuperNodes on loopback, with TLS and authentication, started and stopped by their process ids.

They also end when the process of the tests is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

import fedssl
from fedssl.recipe import Recipe
from fedssl.run_directory import RunDirectory


def make_authority(folder: Path) -> None:
    """A certificate authority and a server's certificate for localhost, as docs/deploy.md makes them."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "server.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-days", "365", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", *key, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "365", "-extfile", "server.ext")
    openssl("x509", "-req", "-in", "server.csr", *signing, "-out", "server.crt")


def make_key(path: Path) -> None:
    """A site's key pair, `path` and `path`.pub."""
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def with_package() -> dict[str, str]:
    """This process's environment, in which the package that is tested is found from any folder."""
    paths = [str(Path(fedssl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Deployment:
    """Everything below one folder; `close` ends every process that was started."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        make_authority(folder / "superlink")
        home = folder / "operator"
        home.mkdir()
        certificate = folder / "superlink" / "ca.crt"
        (home / "config.toml").write_text(
            f'[superlink.test]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{certificate}"\n'
        )

    # Processes

    def start(self, name: str, arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen:
        home = self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        from fedssl.engines.flower_nodes import end_with_parent

        variables = with_package() | {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"} | (environment or {})
        with open(self.log(name), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedssl", *arguments],
                cwd=self.folder,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        self.processes[name] = process
        return process

    def start_superlink(self) -> None:
        self.start("superlink", ["superlink", "superlink", "--port", str(self.port)])
        self.wait_for(self.listening, "the SuperLink listens")

    def start_node(
        self,
        client: int,
        name: str | None = None,
        authority: Path | None = None,
        environment: dict[str, str] | None = None,
        port: int | None = None,
    ) -> subprocess.Popen:
        name = name or f"site{client}"
        site = self.folder / f"{name}.yaml"
        site.write_text(yaml.safe_dump({"client": client, "state": str(self.folder / f"state-{name}")}))
        certificate = authority or self.folder / "superlink" / "ca.crt"
        arguments = ["supernode", str(site), "--superlink", f"127.0.0.1:{port or self.port}"]
        arguments += ["--root-certificates", str(certificate), "--key", str(self.key(name))]
        return self.start(name, arguments, environment)

    def key(self, name: str) -> Path:
        path = self.folder / f"{name}.key"
        if not path.exists():
            make_key(path)
        return path

    def kill(self, name: str) -> None:
        """SIGKILL to the process and everything that it started."""
        process = self.processes.pop(name)
        self._signal(process, signal.SIGKILL)
        process.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        self._signal(self.processes[name], number)

    def _signal(self, process: subprocess.Popen, number: signal.Signals) -> None:
        for member in _family(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    # Flower's command line

    def flwr(self, *arguments: str) -> dict:
        """Flower's command line, in this process: a new one would take seconds to import it."""
        from flwr.cli.app import app
        from typer.testing import CliRunner

        with _standard_output() as read:
            done = CliRunner(env={"FLWR_HOME": str(self.folder / "operator")}).invoke(
                app, [*arguments, "--format=json"]
            )
            text = read()
        try:
            return json.loads(text)
        except ValueError:
            raise AssertionError(f"flwr {' '.join(arguments)}: {text}{done.output} {done.exception!r}") from None

    def register(self, *names: str) -> None:
        for name in names:
            answer = self.flwr("supernode", "register", f"{self.key(name)}.pub", "test")
            assert answer["success"], answer

    def submit(self, recipe: Recipe, output: Path) -> str:
        from fedssl.engines.flower_app import write_app

        app = self.folder / f"app-{output.name}"
        write_app(recipe, app, str(output))
        answer = self.flwr("run", str(app), "test")
        assert answer["success"], answer
        return str(answer["run-id"])

    def status(self, run: str) -> str:
        """`finished:completed`, `finished:failed`, `running` and so on."""
        answer = self.flwr("list", "test", "--run-id", run)
        return answer["runs"][0]["status"]

    def finish(self, run: str, seconds: float = 120) -> str:
        """Wait for a run's end; its status."""
        self.wait_for(lambda: self.status(run).startswith("finished"), f"run {run} ends", seconds, poll=1.0)
        return self.status(run)

    # The run's folder

    def committed(self, output: Path) -> int:
        """The last committed round; -1 before any."""
        return RunDirectory.open(output).checkpoint.round if (output / "recipe.yaml").is_file() else -1

    # Waiting

    def listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in self.folder.glob("*.log")
        )

    def wait_for(self, condition, what: str, seconds: float = 60, poll: float = 0.1) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}\n{self.logs()}"
            time.sleep(poll)


class CountingProxy:
    """Passes TCP connections on to a port of this machine and counts the bytes of both directions."""

    def __init__(self, port: int):
        self.target = port
        self.bytes = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                outer, _ = self._listener.accept()
                try:
                    inner = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    outer.close()
                    continue
                for pair in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                with self._lock:
                    self.bytes += len(data)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def _standard_output():
    """What is written to the process's own standard output, as Flower does with JSON; read by the yielded function."""
    assert sys.__stdout__ is not None
    sys.__stdout__.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:

        def read() -> str:
            sys.__stdout__.flush()
            file.seek(0)
            return file.read().decode()

        os.dup2(file.fileno(), 1)
        try:
            yield read
        finally:
            sys.__stdout__.flush()
            os.dup2(kept, 1)
            os.close(kept)


def _family(pid: int) -> list[int]:
    """A process and its descendants; some start sessions of their own, so that a process group does not do."""
    found = [pid]
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    for member in found:
        found += children.get(member, [])
    return found


def missing_tools() -> str | None:
    """Why no deployment can be tested here."""
    for tool in ("openssl", "ssh-keygen"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None if Path("/proc/self/stat").exists() else "there is no /proc"
