"""The test of all CUDA kernels on this machine's GPUs, in child processes. `python -m fedkernels.self_test` runs it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

import torch

from fedkernels.internal import first_contact, native, self_test_outcomes
from fedkernels.internal.self_test_outcomes import Card, Outcome

PASSED, FAILED, NOT_TESTED = "passed", "FAILED", "not tested"
_START_LIMIT = 600.0  # seconds until a child process begins to test
_MARK = "fedkernels.self_test: "  # before what a child process tells


class Result(NamedTuple):
    """Of one operator on one kind of card."""

    card: str  # as in "NVIDIA H200"
    operator: str
    outcome: str  # "passed", "FAILED" or "not tested"
    reason: str  # why it did not pass, or ""
    seconds: float


def self_test(*, time_limit: float = 180.0) -> list[Result]:
    """Tests the CUDA kernels of every operator on each kind of GPU that is visible, and prints a table.

    Small fixed inputs of ragged sizes and of every dtype, batches and gradients are compared with the references in
    float64 on the same GPU. The outcomes are kept for the card, the driver and the build in
    ``$XDG_CACHE_HOME/fedkernels`` or ``~/.cache/fedkernels``, and hold for this process, too: an operator that fails
    runs on its reference from then on.

    The first use of an operator on a GPU runs the same test in the process that uses it, and finds wrong values and
    errors that CUDA reports. Only this function also finds what a process does not survive: the test runs in a child
    process, so that a crash or an illegal address ends that process alone, and a time limit ends kernels that hang.
    Such an operator failed, and another child process tests the rest. Nothing is reused from earlier tests.

    Args:
        time_limit: seconds that the tests of a child process may take. One tests all operators unless one fails.

    Returns:
        One result for each operator and kind of GPU; an empty list if no CUDA kernels can run here.
    """
    results = [result for gpu in _gpus() for result in _test_on(gpu, time_limit)]
    print(table(results))
    return results


def table(results: Sequence[Result]) -> str:
    """The results as text, or why there are none."""
    if not results:
        compiled, used = (native.build_info().get(key, "none") for key in ("cuda_compiled", "cuda_used"))
        return f"No CUDA kernels to test: compiled for {compiled}; GPUs: {used}."
    lines = [
        (one.card, one.operator, one.outcome, f"{one.seconds:.1f} s", one.reason)
        for one in [Result("card", "operator", "outcome", "reason", 0), *results]
    ]
    lines[0] = ("card", "operator", "outcome", "time", "reason")
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def _gpus() -> list[int]:
    """The first GPU of each kind of card that can run the kernels."""
    if native.module is None or not native.CUDA or not torch.cuda.is_available():
        return []
    first: dict[Card, int] = {}
    for gpu in range(torch.cuda.device_count()):
        if not native.module.cuda_unusable(gpu):
            first.setdefault(self_test_outcomes.card_of(gpu), gpu)
    return list(first.values())


def _test_on(gpu: int, time_limit: float) -> list[Result]:
    card = self_test_outcomes.card_of(gpu)
    alike = [other for other in range(torch.cuda.device_count()) if self_test_outcomes.card_of(other) == card]
    results: list[Result] = []
    operators = sorted(native.CUDA)
    while operators:
        some = _test_in_child(card.name, gpu, operators, time_limit)
        operators = operators[len(some) :]
        results += some
    for result in results:
        if result.outcome != NOT_TESTED:
            outcome = Outcome(result.operator, result.outcome == PASSED, result.reason)
            self_test_outcomes.save(card, outcome)
            for other in alike:
                first_contact.record(outcome, other, warn=False)
    return results


def _test_in_child(card: str, gpu: int, operators: list[str], time_limit: float) -> list[Result]:
    """Results of the first operators, at least of one; of all, if none fails."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(_child_command(gpu, operators), stdin=subprocess.DEVNULL, stdout=told, stderr=errors)
        try:
            _wait_for_start(process, told)
            end = f"its process ended with exit code {process.wait(time_limit)}"
        except subprocess.TimeoutExpired as error:
            end = f"it did not end within {error.timeout:g} s"
        finally:
            process.kill()
            process.wait()
        told.seek(0)
        errors.seek(0)
        lines = told.read().decode(errors="replace").splitlines()
        last_error = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1][:300]
    messages = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    results = [Result(card, *message) for message in messages if message]
    if not messages:  # an empty one comes first
        reason = f"no test could be started: {end}: {last_error}"
        return [Result(card, operator, NOT_TESTED, reason, 0.0) for operator in operators]
    if len(results) < len(operators) and (not results or results[-1].outcome == PASSED):
        reason = f"{end}: {last_error}" if last_error else end
        seconds = time.monotonic() - start - sum(result.seconds for result in results)
        results.append(Result(card, operators[len(results)], FAILED, reason, seconds))
    return results


def _wait_for_start(process: subprocess.Popen[bytes], told: IO[bytes]) -> None:
    """Waits until the child process has torch and the device, which is no part of a test and can take long."""
    deadline = time.monotonic() + _START_LIMIT
    while os.fstat(told.fileno()).st_size == 0 and process.poll() is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, _START_LIMIT)
        time.sleep(0.05)


def _child_command(gpu: int, operators: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "fedkernels.self_test", "--child", str(gpu), *operators]


def run_as_child(gpu: int, operators: Sequence[str]) -> None:
    """What a child process does: it tells the result of each operator on a line, up to the first that does not pass."""
    torch.cuda.init()
    print(f"{_MARK}[]", flush=True)
    for operator in operators:
        start = time.monotonic()
        outcome, certain = first_contact.run(operator, gpu)
        word = PASSED if outcome.passed else FAILED if certain else NOT_TESTED
        print(_MARK + json.dumps([operator, word, outcome.reason, time.monotonic() - start]), flush=True)
        if not outcome.passed:
            return
