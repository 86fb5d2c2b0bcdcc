"""Flower's commands as forked copies of one process that has imported what they need.

A SuperLink starts a `flwr-serverapp` for every run and a SuperNode a `flwr-clientapp` for every message, both through a
`flower-superexec`. Importing torch, timm and fedssl takes each of them longer than many rounds last, so `run` imports
them once. It puts commands of these names first in the path. Such a command asks `run` for a copy of its process, and
the copy does what Flower's own command would have done, with the asking command's arguments, environment, folder and
output. The command ends with the copy's exit code.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

_STOP_SECONDS = 20.0


_REQUEST_SECONDS = 10.0  # a command sends its request as soon as it is connected


_COPIED_COMMANDS = ("flower-superexec", "flwr-clientapp", "flwr-serverapp")  # by Flower's processes


_RESTARTED_COMMAND = "flower-superexec"  # Flower starts it once; it ends where a request of its own fails


_RESTART_SECONDS = 1.0


_REQUEST = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address})
    request = {{"command": {name}, "arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(connection, [b"+"], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\\n")
    code = connection.recv(1)  # when the copy has ended
sys.exit(code[0] if code else 1)
"""


def run(
    command: list[str],
    environment: dict[str, str],
    modules: Sequence[str],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Run one of Flower's commands, and those that it starts, until it ends or this process is terminated.

    Args:
        command: `flower-superlink` or `flower-supernode`, and its arguments.
        environment: the command's.
        modules: what the copies need besides Flower. They are imported while the command starts, and must not start
            threads or look for a CUDA device when they are imported: a fork has neither.
        prepare: called in the command's process before it starts.

    Returns:
        The command's exit code; 130 where this process was interrupted.
    """
    entry_points = {name: _entry_point(name) for name in (command[0], *_COPIED_COMMANDS)}
    signal.signal(signal.SIGTERM, _raise_interrupt)
    with tempfile.TemporaryDirectory(prefix="fedssl-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "copies")
        listener.bind(address)
        listener.listen()
        for name in _COPIED_COMMANDS:
            file = Path(folder) / name
            file.write_text(_REQUEST.format(python=sys.executable, address=repr(address), name=repr(name)))
            file.chmod(0o700)
        environment = environment | {"PATH": f"{folder}{os.pathsep}{environment['PATH']}"}

        def start() -> int:
            listener.close()
            end_with_parent()
            prepare()
            return _run_entry_point(entry_points[command[0]], command, environment)

        main = fork(start)
        copies: dict[int, Copy] = {}  # by process id
        code: int | None = None
        try:
            for module in modules:
                import_module(module)
            while (code := _exit_code(main)) is None:
                _attend_ended(copies)
                if select.select([listener], [], [], 0.2)[0]:
                    copies |= _start_copy(listener, entry_points)
            return code
        except KeyboardInterrupt:
            return 130
        finally:
            if code is None:
                _terminate({main})
            _terminate(copies.keys())


def fork(work: Callable[[], int]) -> int:
    """Call a function in a copy of this process, which then ends; returns the copy's process id."""
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
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(child: int) -> int:
    """Wait for a copy's end; returns its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def end_with_parent() -> None:
    """Have this process, a child that has just been started, killed when its parent ends. Linux only.

    It is killed because Flower's processes sign off from each other, and try for ever where the other has ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _entry_point(command: str) -> Callable[[], None]:
    [entry] = [e for e in metadata.distribution("flwr").entry_points if e.name == command]
    function: Callable[[], None] = entry.load()
    return function


@dataclass(frozen=True)
class Copy:
    """A copy that runs a command.

    Attributes:
        command: the command's name.
        connection: to the process that has asked for it and waits for its exit code.
        start: what the copy does, in its own process.
    """

    command: str
    connection: socket.socket
    start: Callable[[], int]


def _start_copy(listener: socket.socket, entry_points: dict[str, Callable[[], None]]) -> dict[int, Copy]:
    """Make the copy that a command asks for.

    Returns:
        The copy by its process id; empty where the command ended before it had sent its request.
    """
    connection, _ = listener.accept()
    connection.settimeout(_REQUEST_SECONDS)
    files: list[int] = []
    try:
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as lines:
            request = json.loads(lines.readline())
    except (OSError, ValueError):
        connection.close()
        for file in files:
            os.close(file)
        return {}

    def start() -> int:
        listener.close()
        end_with_parent()
        os.setsid()  # Ctrl-C in the terminal is for Flower's command, which ends what it started
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(request["folder"])
        command = [request["command"], *request["arguments"]]
        return _run_entry_point(entry_points[command[0]], command, request["environment"])

    copy = fork(start)
    if request["command"] != _RESTARTED_COMMAND:  # which needs them again
        for file in files:
            os.close(file)
    return {copy: Copy(request["command"], connection, start)}


def _attend_ended(copies: dict[int, Copy]) -> None:
    """Send the exit codes of copies that have ended; start the one again without which no later run would begin."""
    for process in list(copies):
        code = _exit_code(process)
        if code is None:
            continue
        copy = copies.pop(process)
        if code and copy.command == _RESTARTED_COMMAND and not _is_closed(copy.connection):
            print(f"fedssl: {copy.command} has ended with code {code} and is started again", file=sys.stderr)
            time.sleep(_RESTART_SECONDS)
            copies[fork(copy.start)] = copy
            continue
        with copy.connection as connection, suppress(OSError):
            connection.sendall(bytes([code % 256]))


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it sends nothing more."""
    return bool(select.select([connection], [], [], 0)[0])


def _terminate(children: Iterable[int]) -> None:
    """Send children SIGTERM, and SIGKILL to those that do not end."""
    left = set(children)
    for child in left:
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while left and time.monotonic() < deadline:
        left = {child for child in left if _exit_code(child) is None}
        time.sleep(0.05)
    for child in left:  # such as a SuperNode that tries to sign off from a SuperLink that has ended
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run_entry_point(entry: Callable[[], None], command: list[str], environment: dict[str, str]) -> int:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    entry()
    return 0


def _exit_code(child: int) -> int | None:
    """A child's exit code; None while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _raise_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
