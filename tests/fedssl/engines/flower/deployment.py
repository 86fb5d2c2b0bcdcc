"""A SuperLink and SuperNodes on loopback, with TLS and authentication, started and stopped by their process ids.

They also end when the process of the tests is killed. Nothing here waits for a fixed time: on a machine that is busy
with other things everything takes longer and ends the same.
"""

import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import yaml

import fedssl
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import RunDirectory

#: seconds until a wait is given up; what takes that long on a busy machine will not happen
PATIENCE = 600.0
#: an environment variable that tells whose process one is; children inherit it, also those that leave the process group
MARK = "FEDSSL_TEST_PROCESS"
#: processes are found there
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
#: `fedssl` whose sites break a round where a file says so
COMMAND = Path(__file__).with_name("flower_command.py")


def marked(mark: str) -> list[int]:
    """The processes whose mark begins with this one."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if any(entry.startswith(wanted) for entry in (folder / "environ").read_bytes().split(b"\0")):
                    pids.append(int(folder.name))
    return pids


def kill_marked(mark: str) -> None:
    """SIGKILL to all processes of a mark, until none is left."""
    while pids := marked(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def poll(condition: Callable[[], bool], what: str, seconds: float = PATIENCE, pause: float = 0.1) -> None:
    """Wait until a condition holds; AssertionError with `what` after a long time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s until {what}"
        time.sleep(pause)


def make_authority(folder: Path) -> None:
    """A certificate authority and a server's certificate for localhost."""
    from cryptography.hazmat.primitives.serialization import Encoding

    from fedssl.deploy.certificates import Authority
    from fedssl.deploy.keys import server_key

    folder.mkdir(parents=True, exist_ok=True)
    issued = Authority(folder, "tests").issue(server_key(folder / "server.key").public_key(), "localhost", 365)
    (folder / "server.crt").write_bytes(issued.public_bytes(Encoding.PEM))


def free_port() -> int:
    """A port to listen on, below those from which systems make connections: one of these could take it meanwhile."""
    for port in random.sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are taken")


def is_listening(port: int, address: str = "127.0.0.1") -> bool:
    """Whether a port of this machine takes connections."""
    with contextlib.suppress(OSError), socket.create_connection((address, port)):
        return True
    return False


def with_package() -> dict[str, str]:
    """This process's environment, in which the package that is tested is found from any folder."""
    paths = [str(Path(fedssl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Deployment:
    """Everything below one folder; `close` ends every process that was started."""

    def __init__(self, folder: Path, patience: float = PATIENCE, command: Path = COMMAND):
        self.folder = folder
        self.command = command
        self.patience = patience  # seconds until a wait is given up
        self.port = self.sites_port = free_port()  # the second is where the sites reach the SuperLink
        self.processes: dict[str, subprocess.Popen] = {}
        self.faults = folder / "faults"
        self.faults.mkdir()
        make_authority(folder / "superlink")
        home = folder / "operator"
        home.mkdir()
        certificate = folder / "superlink" / "ca.crt"
        (home / "config.toml").write_text(
            f'[superlink.test]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{certificate}"\n'
        )

    # Processes

    def start(self, name: str, arguments: list[str], before: tuple[str, ...] = ()) -> subprocess.Popen:
        """Start a command of `fedssl`; `before` is a program that starts it, with its arguments."""
        from fedssl.deploy.flower_commands import end_with_parent

        parent, home = os.getpid(), self.folder / f"home-{name}"
        home.mkdir(exist_ok=True)
        variables = {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1", MARK: self._mark(name)}
        with open(self.log(name), "ab") as log:
            process = subprocess.Popen(
                [*before, sys.executable, str(self.command), str(self.faults), *arguments],
                cwd=self.folder,
                env=with_package() | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: end_with_parent(parent),
            )
        self.processes[name] = process
        return process

    def start_superlink(self) -> None:
        self.start("superlink", ["superlink", "superlink", "--port", str(self.port)])
        self.wait_for(lambda: is_listening(self.port), "the SuperLink listens")

    def start_node(self, name: str, authority: Path | None = None, before: tuple[str, ...] = ()) -> subprocess.Popen:
        """A site's SuperNode."""
        site = self.folder / f"{name}.yaml"
        site.write_text(yaml.safe_dump({"state": str(self.folder / f"state-{name}")}))
        certificate = authority or self.folder / "superlink" / "ca.crt"
        arguments = ["supernode", str(site), "--superlink", f"127.0.0.1:{self.sites_port}"]
        arguments += ["--root-certificates", str(certificate), "--key", str(self.key(name))]
        return self.start(name, arguments, before)

    def key(self, name: str) -> Path:
        """A site's private key, beside which is NAME.key.pub."""
        from fedssl.deploy.keys import public_text, site_key

        path = self.folder / f"{name}.key"
        Path(f"{path}.pub").write_text(public_text(site_key(path).public_key()))
        return path

    def kill(self, name: str) -> None:
        """SIGKILL to the process and everything that it started."""
        process = self.processes.pop(name)
        process.kill()
        kill_marked(self._mark(name))
        process.wait()
        if name == "superlink":  # a killed process still listens for as long as its memory is taken down
            poll(lambda: not is_listening(self.port), "the killed SuperLink listens no more")

    def close(self) -> None:
        kill_marked(f"{self.folder}/")
        for process in self.processes.values():
            process.wait()

    def _mark(self, name: str) -> str:
        return f"{self.folder}/{name}/"

    # Flower's command line

    def flwr(self, *arguments: str) -> dict:
        return run_flwr(self.folder / "operator", *arguments)

    def register(self, *names: str) -> None:
        """Register keys at the SuperLink, and bind them to clients' numbers in the order of the calls, from 0."""
        from fedssl.deploy.keys import site_key
        from fedssl.engines.flower.site_files import key_fingerprint

        manifest = self.folder / "superlink" / "sites" / "manifest.yaml"
        manifest.parent.mkdir(exist_ok=True)
        sites = yaml.safe_load(manifest.read_text())["sites"] if manifest.exists() else {}
        for name in names:
            answer = self.flwr("supernode", "register", f"{self.key(name)}.pub", "test")
            assert answer["success"], answer
            sites[name] = key_fingerprint(site_key(self.key(name)).public_key())
        manifest.write_text(yaml.safe_dump({"sites": sites}, sort_keys=False))

    def submit(self, recipe: Recipe, output: Path) -> str:
        from fedssl.deploy.apps import write_app

        app = self.folder / f"app-{output.name}"
        write_app(recipe, app, str(output))
        answer = self.flwr("run", str(app), "test")
        assert answer["success"], answer
        return str(answer["run-id"])

    def look(self, run: str) -> dict:
        """What the SuperLink knows of a run: its `status`, its `network-traffic` and so on."""
        return self.flwr("list", "test", "--run-id", run)["runs"][0]

    def finish(self, run: str) -> str:
        """Wait for a run's end; its status: `finished:completed`, `finished:failed`."""
        self.wait_for(lambda: self.look(run)["status"].startswith("finished"), f"run {run} ends", pause=0.5)
        return self.look(run)["status"]

    # A run

    def break_round(self, recipe: Recipe, client: int, number: int, fault: str) -> Path:
        """Let a site break a round of the recipe's seed (flower_command.py); the file is gone once it does."""
        file = self.faults / f"seed-{recipe.seed}-client-{client}-round-{number}"
        file.write_text(fault)
        return file

    def committed(self, output: Path) -> int:
        """The last committed round; -1 before any."""
        return RunDirectory.open(output).checkpoint.round if (output / "recipe.yaml").is_file() else -1

    # Waiting

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        return read_logs(self.folder)

    def wait_for(self, condition: Callable[[], bool], what: str, pause: float = 0.1) -> None:
        """Wait for a condition; fails at once where a SuperLink or a site of the run has ended by itself."""

        def holds() -> bool:
            ended = [name for name in ("superlink", "site0", "site1", "site2") if self.has_ended(name)]
            assert not ended, f"{ended} ended before {what}\n{self.logs()}"
            return condition()

        try:
            poll(holds, what, self.patience, pause)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def has_ended(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is not None


def run_flwr(home: Path, *arguments: str) -> dict:
    """The answer of Flower's command line, in this process: a new one would take seconds to import it."""
    from flwr.cli.app import app
    from typer.testing import CliRunner

    with mock.patch.object(sys, "__stdout__", io.StringIO()) as out:  # where Flower writes JSON
        done = CliRunner(env={"FLWR_HOME": str(home)}).invoke(app, [*arguments, "--format=json"])
    try:
        answer: dict = json.loads(out.getvalue())
    except ValueError:
        raise AssertionError(f"flwr {' '.join(arguments)}: {out.getvalue()}{done.output} {done.exception!r}") from None
    return answer


def read_logs(folder: Path) -> str:
    """The ends of a folder's logs."""
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)
