"""The first use of an operator on a GPU tests its kernels there. Until they pass, the reference serves.

The test runs in this process, because a child process would take longer to import torch and to open the device than
the whole test takes. It finds wrong values, NaN, and errors that a launch or the next synchronisation reports. It
cannot survive a crash, and it cannot end a kernel that hangs. After an illegal address no CUDA call of this process
succeeds any more, so that the reference fails, too. `fedkernels.self_test` finds all of these, in a child process with
a time limit. Either way the outcome is kept (self_test_outcomes.py), and the next process uses the reference from the
start.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from fedkernels.internal import self_test_cases, self_test_outcomes
from fedkernels.internal.autograd import is_without_data
from fedkernels.internal.self_test_outcomes import Outcome

REPORT = "Please report this to the maintainers of fedkernels with the output of `python -m fedkernels.self_test`"
# By operator and GPU, once it is known: do the kernels serve? Every call looks here, and nowhere else afterwards.
verdicts: dict[tuple[str, int], bool] = {}
_reasons: dict[tuple[str, int], str] = {}  # why kernels do not serve
_warned: set[int] = set()  # GPUs for which it was said that a traced operator is not tested
_lock = threading.Lock()


def is_off() -> bool:
    """Does the environment turn the test at first use off? All kernels serve then."""
    return os.environ.get("FEDKERNELS_SELF_TEST") == "0"


def known(operator: str, gpu: int) -> Outcome | None:
    """The outcome of an operator's test on a GPU, of this process or kept by an earlier one; None: not tested yet."""
    key = operator, gpu
    if key in verdicts:
        return Outcome(operator, verdicts[key], _reasons.get(key, ""))
    return self_test_outcomes.load(self_test_outcomes.card_of(gpu), operator)


def verdict(operator: str, gpu: int) -> bool | None:
    """Do the operator's kernels serve on this GPU? None: they are not tested yet. A failure warns once."""
    if (operator, gpu) not in verdicts:
        outcome = Outcome(operator, passed=True) if is_off() else known(operator, gpu)
        if outcome is not None:
            record(outcome, gpu)
    return verdicts.get((operator, gpu))


def may_test(gpu: int, tensors: Sequence[Tensor]) -> bool:
    """Can a test be started? Not for tensors without data and not while a graph is captured; tells that once."""
    if not (any(is_without_data(tensor) for tensor in tensors) or _is_captured(gpu)):
        return True
    warn_untested(gpu)
    return False


def warn_untested(gpu: int) -> None:
    """Tells, once for a GPU, that what is traced or captured uses references."""
    if gpu not in _warned:
        _warned.add(gpu)
        warnings.warn(
            f"operators of fedkernels that are traced or captured here use their slower references on cuda:{gpu}, "
            "because their CUDA kernels are not tested there yet. Call them once outside of torch.compile and CUDA "
            "graphs, or run `python -m fedkernels.self_test` once on this machine.",
            UserWarning,
            stacklevel=5,
        )


# torch.compile treats the result as a constant. The attribute is the one that torch.compiler.assume_constant_result
# sets; calling that would import the compiler, which takes seconds.
warn_untested._dynamo_marked_constant = True  # type: ignore[attr-defined]


def test(operator: str, gpu: int) -> bool:
    """Tests the operator's kernels on this GPU unless another thread has done so, and keeps the outcome."""
    with _lock:
        serves = verdict(operator, gpu)
        if serves is None:
            outcome, certain = _in_new_thread(lambda: run(operator, gpu))
            record(outcome, gpu)
            if certain:
                self_test_outcomes.save(self_test_outcomes.card_of(gpu), outcome)
            serves = outcome.passed
    return serves


def record(outcome: Outcome, gpu: int, warn: bool = True) -> None:
    """Lets the kernels serve, or the reference after one warning."""
    key = outcome.operator, gpu
    verdicts[key], _reasons[key] = outcome.passed, outcome.reason
    if not outcome.passed and warn:
        warnings.warn(
            f"fedkernels.{outcome.operator} runs on its slower reference on cuda:{gpu} "
            f"({self_test_outcomes.card_of(gpu).name}), where its CUDA kernels did not pass the self-test: "
            f"{outcome.reason}. {REPORT}.",
            UserWarning,
            stacklevel=6,
        )


def run(operator: str, gpu: int) -> tuple[Outcome, bool]:
    """Runs all cases of an operator. -> the outcome, and whether it is certain: the reference may lack memory, say."""
    name = "before the first case"
    try:
        with _on(gpu) as device:
            for case in self_test_cases.cases_of(operator, torch.backends.cuda.matmul.fp32_precision == "tf32"):
                name = case.name
                inputs = [tensor.to(device) for tensor in case.inputs]
                wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
                truths = [truth.cpu() for truth in case.reference(*wide)]
                try:
                    results = [result.cpu() for result in case.kernel(*inputs)]  # waits for the kernels
                    wrong = self_test_cases.difference(case, results, truths)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    wrong = _in_one_line(error)
                    if not _still_works(device):
                        wrong += " (no CUDA call of this process succeeds any more: start it again)"
                if wrong:
                    return Outcome(operator, False, f"{name}: {wrong}"), True
    except Exception as error:
        return Outcome(operator, False, f"it could not be tested ({name}: {_in_one_line(error)})"), False
    return Outcome(operator, True), True


def _still_works(device: torch.device) -> bool:
    """Does CUDA work after an error? The first call may report that error once more."""
    for _ in range(2):
        with suppress(Exception):
            torch.ones(1, device=device).cpu()
            return True
    return False


def _in_one_line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


@contextmanager
def _on(gpu: int) -> Iterator[torch.device]:
    """The GPU as the current device, where the host may wait."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        with torch.cuda.device(gpu):
            yield torch.device("cuda", gpu)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _is_captured(gpu: int) -> bool:
    """Does a CUDA graph capture the current stream of this GPU or of the current one? It would break by a test."""
    if torch.cuda.is_current_stream_capturing():
        return True
    with torch.cuda.device(gpu):
        return torch.cuda.is_current_stream_capturing()


def _in_new_thread(function: Callable[[], tuple[Outcome, bool]]) -> tuple[Outcome, bool]:
    """In a thread of its own nothing of the caller's holds: no grad, inference, autocast, modes, streams, devices."""
    results: list[tuple[Outcome, bool]] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="fedkernels self-test", daemon=True)
    thread.start()
    thread.join()
    return results[0]
