"""Run Flower's SuperLink or SuperNode in this process, with its apps as forks of one that has imported what they need.

A SuperLink runs a `flwr-serverapp` for every run and a SuperNode a `flwr-clientapp` for every message. Importing torch,
timm and fedssl takes each of them longer than many rounds last. So `flower-superexec`, which starts them, is a process
that imports all of it when the first app is asked for, and forks the apps.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

from flwr.supercore.superexec.executor import subprocess_executor

_RESTART_SECONDS = 1.0


def run(command: Sequence[str], starter: Sequence[str], environment: Mapping[str, str], modules: Sequence[str]) -> int:
    """Run one of Flower's commands in this process until it ends, and `flower-superexec` beside it.

    Args:
        command: the command with its arguments.
        starter: how `flower-superexec` reaches it, as that command's arguments.
        environment: variables that are set before.
        modules: what the apps need besides Flower. They must not start threads or look for a CUDA device when they are
            imported: a fork has neither.

    Returns:
        The command's exit code; 130 if it was interrupted before it could handle that.
    """
    os.environ.update(environment)
    names = (command[0], "flower-superexec", "flwr-clientapp", "flwr-serverapp")
    entry_points = {name: _entry_point(name) for name in names}

    def start_apps() -> int:
        os.setsid()  # Ctrl-C in the terminal is for the command alone, with which this process ends
        while code := os.waitstatus_to_exitcode(os.waitpid(fork(take_tasks), 0)[1]):
            print(f"fedssl: flower-superexec has ended with code {code} and is started again", file=sys.stderr)
            time.sleep(_RESTART_SECONDS)
        return 0

    def take_tasks() -> int:
        end_with_threads()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how an app has ended
        executor: Any = subprocess_executor
        executor.subprocess = SimpleNamespace(Popen=start_app, DEVNULL=None)
        sys.argv = ["flower-superexec", *starter]
        entry_points["flower-superexec"]()
        return 1  # it is to go on for ever

    def start_app(app: list[str], **_: Any) -> None:
        for module in modules:
            import_module(module)
        fork(lambda: work_as(app))

    def work_as(app: list[str]) -> int:
        threading.excepthook = threading.__excepthook__
        sys.argv = app
        entry_points[app[0]]()
        return 0

    fork(start_apps)
    end_with_threads()
    sys.argv = [*command, "--isolation", "process"]  # with which Flower starts no flower-superexec of its own
    try:
        entry_points[command[0]]()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    print(f"fedssl: {command[0]} ends after the error above; it may be started again", file=sys.stderr)
    return 1


def fork(work: Callable[[], int]) -> int:
    """Call a function in a copy of this process, which then ends, or with this one; return the copy's process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        end_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with_parent(parent: int) -> None:
    """Have this process, a child that `parent` has just started, killed when that ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended before, and no signal will come
            os._exit(1)


def end_with_threads() -> None:
    """End this process when a thread fails, so that it is started again: Flower's processes need all their threads.

    Not where the server has refused a request with 401: Flower then interrupts its process, which ends in good order.
    """

    def end(failure: threading.ExceptHookArgs) -> None:
        if getattr(getattr(failure.exc_value, "response", None), "status_code", None) == 401:
            return
        threading.__excepthook__(failure)
        text = f"{os.path.basename(sys.argv[0])} ends, because a part of it failed: {failure.exc_value}"
        print(f"fedssl: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.excepthook = end


def _entry_point(command: str) -> Callable[[], None]:
    [entry] = [e for e in metadata.distribution("flwr").entry_points if e.name == command]
    function: Callable[[], None] = entry.load()
    return function
