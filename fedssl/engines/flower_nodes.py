"""Flower's two processes with safe settings: `fedssl superlink` and `fedssl supernode`.

A SuperNode starts a fresh `flwr-clientapp` for every message, and importing torch, timm and fedssl takes longer than
many a round. `supernode` therefore stays behind as a process that has imported them and puts a command of that name
first in the SuperNode's path; the command asks it for a forked copy of itself, which then runs Flower's own ClientApp.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from ..data.datasets import load_dataset
from ..errors import UserError
from ..site import load_site

_STOP_SECONDS = 20.0
#: what a copy may need; none of them starts threads or looks for a CUDA device when it is imported
_IMPORTED = ("fedssl.engines.flower", "flwr.supernode.cli", "sklearn.datasets", "timm")
_COMMAND = """\
#!{python} -IS
import json, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address})
    connection.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    connection.recv(1)  # until the app has ended
"""


def superlink(folder: Path, host: str, port: int, insecure: bool) -> None:
    """Become Flower's SuperLink; returns only by an error.

    Args:
        folder: holds ca.crt, server.crt and server.key, and keeps the SuperLink's database: what it knows survives it.
        host, port: where sites and operators reach it.
        insecure: without TLS and without authentication of the sites.

    Raises:
        UserError: a file is missing.
    """
    command = ["flower-superlink", "--host", host, "--port", str(port)]
    command += ["--database", str(_existing(folder, "the SuperLink's folder") / "superlink.db")]
    command += ["--disable-runtime-dependency-installation"]  # it would call uv, which needs the network
    if insecure:
        _warn("no TLS: what travels can be read and changed on the way, and anyone can take part")
        command += ["--insecure"]
    else:
        files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
        for option, name in files.items():
            command += [option, str(_existing(folder / name, "needed for TLS (docs/deploy.md makes it)"))]
        command += ["--enable-supernode-auth"]
    environment = _environment()
    executable = shutil.which(command[0], path=environment["PATH"])
    if executable is None:
        raise UserError("flower-superlink is not installed: pip install 'fedkernels-fedssl[flower]'")
    sys.stderr.flush()
    os.execve(executable, command, environment)


def supernode(site_file: Path, address: str, certificate: Path | None, key: Path | None, insecure: bool) -> int:
    """Run Flower's SuperNode for a site until it ends or this process is told to; returns its exit code.

    Args:
        site_file: the site's YAML file (site.py); it is checked and its data are looked at before anything is started.
        address: of the SuperLink, as host:port.
        certificate: the authority's certificate that the SuperLink's is signed by.
        key: the site's private key, whose public part the SuperLink knows.
        insecure: without TLS and without the site's authentication.

    Raises:
        UserError: a file is missing or wrong.
    """
    command = ["flower-supernode", "--superlink", address, "--port", str(_free_port())]
    command += ["--node-config", f"site={json.dumps(str(site_file.absolute()))}"]
    if insecure:
        _warn("no TLS: what travels can be read and changed on the way, and the server is not who it says it is")
        command += ["--insecure"]
    else:
        if certificate is None or key is None:
            raise UserError("give --root-certificates and --key, or --insecure for a test on this machine alone")
        command += ["--root-certificates", str(_existing(certificate, "the authority's certificate"))]
        command += ["--auth-supernode-private-key", str(_existing(key, "the site's private key"))]
    # in a copy, because this process is forked later: it must not have used torch's threads or CUDA until then
    if _wait(_fork(lambda: _check(site_file))):
        return 2
    for module in _IMPORTED:
        import_module(module)

    with tempfile.TemporaryDirectory(prefix="fedssl-") as folder, socket.socket(socket.AF_UNIX) as listener:
        bound = str(Path(folder) / "copies")
        listener.bind(bound)
        listener.listen()
        file = Path(folder) / "flwr-clientapp"
        file.write_text(_COMMAND.format(python=sys.executable, address=repr(bound)))
        file.chmod(0o700)
        # Flower looks for a new message's task every second; a round has several such steps one after another
        environment = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3"} | _environment()
        environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
        signal.signal(signal.SIGTERM, _interrupt)
        process = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)
        try:
            return _serve(listener, process)
        except KeyboardInterrupt:
            return 130
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:  # it is still looking for a SuperLink that has gone, to take its leave
                process.kill()
                process.wait()


def _serve(listener: socket.socket, process: subprocess.Popen[bytes]) -> int:
    copies: set[int] = set()
    while process.poll() is None:
        copies = {copy for copy in copies if os.waitpid(copy, os.WNOHANG)[0] == 0}
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection, _ = listener.accept()
        with connection:
            with connection.makefile("rb") as lines:
                arguments = json.loads(lines.readline())

            def run_app(arguments: list[str] = arguments) -> int:
                from flwr.supernode.cli import flwr_clientapp

                listener.close()
                sys.argv = ["flwr-clientapp", *arguments]
                flwr_clientapp()
                return 0

            copies.add(_fork(run_app))
    return process.returncode


def _fork(work: Callable[[], int]) -> int:
    """Do something in a copy of this process; the copy's process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _check(site_file: Path) -> int:
    try:
        site = load_site(site_file)
        if site.data is not None:
            load_dataset(site.data, 0)
        site.state.expanduser().mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        print(f"fedssl: {error}", file=sys.stderr)
        return 2
    return 0


def _environment() -> dict[str, str]:
    """This process's, with Flower's commands of the same installation first in the path."""
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path}


def end_with_parent() -> None:
    """In a child that has just been started: be told to end when the parent is killed. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _existing(path: Path, what: str) -> Path:
    if not path.exists():
        raise UserError(f"{path} does not exist: {what}")
    return path.absolute()


def _free_port() -> int:
    """For the SuperNode's own processes, on this machine alone; several nodes may share a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _warn(text: str) -> None:
    print(f"fedssl: warning: insecure: {text}", file=sys.stderr)
