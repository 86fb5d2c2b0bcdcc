"""The self-test of CUDA kernels in child processes: what starts and watches one, and what one does.

A crash, an illegal address or a kernel that hangs ends the child process alone, and another one tests the rest.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedkernels.internal import self_test_cases, self_test_outcomes
from fedkernels.internal.self_test_outcomes import FAILED, NOT_TESTED, PASSED, Card, Result

_START_LIMIT = 120.0  # seconds, at least, until the first word of a child: a busy machine may need them to import torch
_MARK = "fedkernels.self_test: "  # before what a child process tells
_FOLDER = Path(__file__).parents[2]  # which holds fedkernels
_SIGNALS: dict[int | None, str] = {-one: one.name for one in signal.Signals}  # by the exit code of what it ended
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")  # others are sent from outside, as where memory ends
# Errors that come from what else runs on the card. CUDA, cuBLAS and torch have their own words for no memory.
_NO_MEMORY = ("out of memory", "out_of_memory", "cublas_status_alloc_failed", "cublas_status_not_initialized")


def test(gpu: int, operators: Set[str], time_limit: float) -> dict[str, Result]:
    """Tests the kernels of these operators in child processes, and keeps what is certain. -> the results by operator"""
    card, results = self_test_outcomes.card_of(gpu), dict[str, Result]()
    while len(results) < len(operators):
        rest = sorted(operators - results.keys())
        results |= {result.operator: result for result in _test_in_child(gpu, card, rest, time_limit)}
    self_test_outcomes.save(card, results)
    return results


def _test_in_child(gpu: int, card: Card, operators: Sequence[str], time_limit: float) -> list[Result]:
    """Results of the first operators, at least of one; of all, unless the process ended or CUDA broke in it."""

    def not_started(reason: str) -> list[Result]:
        return [Result(card.name, name, NOT_TESTED, f"no test could be started: {reason}") for name in operators]

    # An embedded or frozen Python would start the user's program once more.
    if getattr(sys, "frozen", False) or "python" not in Path(sys.executable or "").name.lower():
        return not_started(f"sys.executable is {sys.executable!r}, which is no Python interpreter")
    try:
        messages, code, last_error = _watch(_child_command(gpu, operators), time_limit)
    except (OSError, RuntimeError) as error:  # RuntimeError: while Python ends
        return not_started(f"no child process can be started ({error})")
    ended_with = _SIGNALS.get(code, f"exit code {code}")
    limit = time_limit if messages else max(time_limit, _START_LIMIT)
    end = f"it did not end within {limit:g} s" if code is None else f"its process ended with {ended_with}"
    end += f": {last_error}" if last_error else ""
    if not messages:
        return not_started(end)
    if messages[0] != list(card):
        return not_started(f"the child process has another GPU in this place, {messages[0]}")
    results = [Result(card.name, *message) for message in messages[1:]]
    ended_on_purpose = code == 0 and results and results[-1].outcome == FAILED
    if len(results) < len(operators) and not ended_on_purpose:
        outcome = FAILED if code is None or ended_with in _CRASHES else NOT_TESTED
        results.append(Result(card.name, operators[len(results)], outcome, end))
    return results


def _child_command(gpu: int, operators: Sequence[str]) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "fedkernels.self_test", "--child", str(gpu), *operators]


def _watch(command: Sequence[str], time_limit: float) -> tuple[list[list[Any]], int | None, str]:
    """Runs the command until it tells nothing new for the time limit, which holds from its first word on.

    Returns:
        What it told, its exit code (None if it had to be ended), and its last line of errors.
    """
    # The packages are those of this process. MPS is passed by, for its server tells an illegal address to all clients.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_MPS_PIPE_DIRECTORY": os.devnull}
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=told, stderr=errors, cwd=_FOLDER, env=environment
        )
        try:
            size, since, limit_of_start = 0, time.monotonic(), max(time_limit, _START_LIMIT)
            while process.poll() is None and time.monotonic() - since < (time_limit if size else limit_of_start):
                time.sleep(0.02)
                if size != (size := os.fstat(told.fileno()).st_size):
                    since = time.monotonic()
        finally:
            code = process.poll()
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # the driver may hold a process whose kernel hangs
                process.wait(10)
        told.seek(0)
        errors.seek(0)
        lines = told.read().decode(errors="replace").splitlines()
        last_error = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1][:300]
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)], code, last_error


def run_as_child(gpu: int, operators: Sequence[str]) -> None:
    """What a child process does: it tells its card, then the result of each operator, each on a line."""
    device = _open(gpu)
    _tell(list(self_test_outcomes.card_of(gpu)))
    for operator in operators:
        faulthandler.dump_traceback_later(900, exit=True)  # where the process that watches this one is gone
        start = time.monotonic()
        outcome, reason = run(operator, device)
        _tell([operator, outcome, reason, time.monotonic() - start])
        if outcome == FAILED and not _still_works(device):
            return


def run(operator: str, device: torch.device) -> tuple[str, str]:
    """Runs all cases of an operator. -> the outcome, and why the operator did not pass"""
    name, in_kernel = "before the first case", False
    try:
        for case in self_test_cases.cases_of(operator, torch.backends.cuda.matmul.fp32_precision == "tf32"):
            name, in_kernel = case.name, False
            # On the CPU, for a reference may take many thousands of small steps.
            wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in case.inputs]
            truths = list(case.reference(*wide))
            inputs = [tensor.to(device) for tensor in case.inputs]
            in_kernel = True
            results = [result.cpu() for result in case.kernel(*inputs)]  # waits for the kernels
            if wrong := self_test_cases.difference(case, results, truths):
                return FAILED, f"{name}: {wrong}"
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0][:300]
        no_memory = any(words in str(error).lower() for words in _NO_MEMORY)
        outcome = FAILED if in_kernel and not no_memory else NOT_TESTED
        return outcome, f"{name}: {type(error).__name__}: {first_line}"
    return PASSED, ""


def _open(gpu: int) -> torch.device:
    """The GPU as the current device, with a context: what fails here is no kernel's fault."""
    torch.cuda.set_device(gpu)
    torch.ones(1, device="cuda").cpu()
    return torch.device("cuda", gpu)


def _tell(message: list[object]) -> None:
    print(f"\n{_MARK}{json.dumps(message)}", flush=True)  # on a line of its own, whatever a library printed


def _still_works(device: torch.device) -> bool:
    """Does CUDA work after an error? The first call may report that error once more."""
    for _ in range(2):
        with suppress(Exception):
            torch.ones(1, device=device).cpu()
            return True
    return False
