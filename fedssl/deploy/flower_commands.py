"""Flower's commands as forked copies of processes that have imported the modules they need.

A SuperLink starts a `flwr-serverapp` for every run and a SuperNode a `flwr-clientapp` for every message, both through a
`flower-superexec`. Importing torch, timm and fedssl takes each of the apps longer than many rounds last. So there are:

- the process that calls `run`, which waits, and forks `flower-superexec`. It has imported Flower alone;
- the app host, which it forks when an app is asked for. It imports torch and the rest once and forks the apps. When no
  app has run for some minutes it ends, so that a SuperLink or a SuperNode that waits for runs needs little memory.

`run` puts commands of these names first in the path. Such a command asks for a copy. The copy does the work of Flower's
own command, with the asking command's arguments, environment, folder and output. The command ends with its exit code.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from typing import NamedTuple

from ..run_folder.creation import process_folder
from .bad_answers import end_with_threads, survive_bad_answers

_COPIED_COMMANDS = ("flower-superexec", "flwr-clientapp", "flwr-serverapp")  # by Flower's processes
_RESTARTED_COMMAND = "flower-superexec"  # Flower starts it once; it ends if a request of its own fails
_RESTART_SECONDS = 1.0
_IDLE_SECONDS = 600.0  # without an app, after which the app host ends

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


class _Copy(NamedTuple):
    """A copy of this process that runs a command."""

    command: str
    connection: socket.socket  # to the process that has asked for the copy and waits for its exit code
    start: Callable[[], int]  # the copy's work, in its own process


def run(
    command: list[str], environment: dict[str, str], modules: Sequence[str], prepare: Callable[[], None] = lambda: None
) -> int:
    """Run one of Flower's commands, and those that it starts, until it ends or this process is terminated.

    `modules` are those that the apps need besides Flower. The app host imports them; they must not start threads or
    look for a CUDA device when they are imported: a fork has neither. `prepare` is called in the command's process
    before it starts.

    Returns:
        The command's exit code; 130 if this process was interrupted.
    """
    survive_bad_answers()
    entry_points = {name: _entry_point(name) for name in (command[0], *_COPIED_COMMANDS)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    with (
        process_folder() as folder,
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as app_listener,
    ):
        addresses = {listener: str(folder / "copies"), app_listener: str(folder / "apps")}
        for waiting, address in addresses.items():
            waiting.bind(address)
            waiting.listen()
        for name in _COPIED_COMMANDS:
            address = addresses[listener if name == _RESTARTED_COMMAND else app_listener]
            file = folder / name
            file.write_text(_REQUEST.format(python=sys.executable, address=repr(address), name=repr(name)))
            file.chmod(0o700)
        environment = environment | {"PATH": f"{folder}{os.pathsep}{environment['PATH']}"}

        def start() -> int:
            listener.close()
            app_listener.close()
            end_with_parent()
            prepare()
            _run_entry_point(entry_points[command[0]], command, environment)
            if command[0] == "flower-supernode":  # ends with SystemExit, and returns after an error that it has logged
                print("fedssl: the site ends after the error above; it may be started again", file=sys.stderr)
                return 1
            return 0

        main = fork(start)
        copies: dict[int, _Copy] = {}  # by process id
        app_host: int | None = None
        code: int | None = None
        try:
            while (code := _exit_code(main)) is None:
                _handle_ended(copies)
                if app_host is not None and (host_code := _exit_code(app_host)) is not None:
                    app_host = None
                    if host_code and select.select([app_listener], [], [], 0)[0]:
                        app_listener.accept()[0].close()  # what the app needs cannot be imported: the command ends
                asked = [listener] if app_host is not None else [listener, app_listener]
                ready = select.select(asked, [], [], 0.2)[0]
                if listener in ready:
                    copies |= _start_copy(listener, entry_points)
                if app_listener in ready:
                    app_host = fork(lambda: _host_apps(app_listener, entry_points, modules))
            return code
        except KeyboardInterrupt:
            return 130
        finally:
            if code is None:
                _terminate({main})
            _terminate({*copies, *([] if app_host is None else [app_host])})


def _host_apps(listener: socket.socket, entry_points: dict[str, Callable[[], None]], modules: Sequence[str]) -> int:
    """Import modules and make copies for apps, in a process of its own, until none has run for `_IDLE_SECONDS`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_with_parent()
    copies: dict[int, _Copy] = {}
    try:
        for module in modules:
            import_module(module)
        idle_since = time.monotonic()
        while copies or time.monotonic() - idle_since < _IDLE_SECONDS:
            _handle_ended(copies)
            if select.select([listener], [], [], 0.2)[0]:
                copies |= _start_copy(listener, entry_points)
            if copies:
                idle_since = time.monotonic()
        return 0
    except KeyboardInterrupt:
        return 130
    finally:
        _terminate(copies.keys())


def fork(work: Callable[[], int]) -> int:
    """Call a function in a copy of this process, which then ends; return the copy's process id."""
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


def end_with_parent() -> None:
    """Have this process, a child that has just been started, killed when its parent ends. Linux only.

    SIGTERM is not enough: Flower's processes sign off from each other, and try for ever if the other has ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _entry_point(command: str) -> Callable[[], None]:
    [entry] = [e for e in metadata.distribution("flwr").entry_points if e.name == command]
    function: Callable[[], None] = entry.load()
    return function


def _start_copy(listener: socket.socket, entry_points: dict[str, Callable[[], None]]) -> dict[int, _Copy]:
    """Return the copy that a command asks for, by process id; none if the command ended before it had asked."""
    connection, _ = listener.accept()
    connection.settimeout(10.0)  # a command sends its request as soon as it is connected
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
        os.setsid()  # Ctrl-C in the terminal is for Flower's command, which ends the processes that it started
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(request["folder"])
        command = [request["command"], *request["arguments"]]
        return _run_entry_point(entry_points[command[0]], command, request["environment"])

    copy = fork(start)
    if request["command"] != _RESTARTED_COMMAND:  # which needs them again
        for file in files:
            os.close(file)
    return {copy: _Copy(request["command"], connection, start)}


def _handle_ended(copies: dict[int, _Copy]) -> None:
    """Send the exit codes of copies that have ended; restart `flower-superexec`, without which no run would begin."""
    for process in list(copies):
        if (code := _exit_code(process)) is None:
            continue
        copy = copies.pop(process)
        is_waited_for = not select.select([copy.connection], [], [], 0)[0]  # a closed connection can be read
        if code and copy.command == _RESTARTED_COMMAND and is_waited_for:
            print(f"fedssl: {copy.command} has ended with code {code} and is started again", file=sys.stderr)
            time.sleep(_RESTART_SECONDS)
            copies[fork(copy.start)] = copy
            continue
        with copy.connection as connection, suppress(OSError):
            connection.sendall(bytes([code % 256]))


def _terminate(children: Iterable[int]) -> None:
    """Send children SIGTERM, and SIGKILL to those that do not end."""
    left = set(children)
    for child in left:
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + 20.0
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
    if not command[0].startswith("flwr-"):  # those are a run's own processes
        end_with_threads()
    entry()
    return 0


def _exit_code(child: int) -> int | None:
    ended, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None
