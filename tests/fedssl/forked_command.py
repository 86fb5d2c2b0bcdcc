"""`fedssl` in a process of its own that is forked from one which has imported everything: it starts at once.

A signal, a limit or an exit code means to it what it means to the command that a user types; only the interpreter's own
start is left out.
"""

import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["fedssl.cli", "fedssl.engines.in_process", "sklearn.datasets", "timm"])


def start_command(arguments: list[str], errors: Path, largest_file: int | None = None) -> ForkServerProcess:
    """Start `fedssl ARGUMENTS` on one thread; its standard error goes to a file, its standard output nowhere.

    `largest_file` is the number of bytes that a file may have, as on a disk that is full.
    """
    process = _FORKING.Process(target=_run, args=(arguments, errors, largest_file), daemon=True)
    process.start()
    return process


def _run(arguments: list[str], errors: Path, largest_file: int | None) -> None:
    import torch

    from fedssl.cli import main

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write that is too large fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    torch.set_num_threads(1)
    sys.argv = ["fedssl", *arguments]
    main()
