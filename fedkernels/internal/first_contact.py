"""The first use of an operator on a GPU finds out whether its CUDA kernels serve there. Otherwise the reference does.

The kernels are tested in a child process (self_test_process.py), once for each card, driver and build. This process
waits for it and calls neither torch nor CUDA meanwhile, so that a first use may be anywhere: in a backward hook, while
a CUDA graph is captured, while torch.compile traces. What is found holds until this process ends. If the kernels began
to serve in the middle of a run, two runs of one program would differ.
"""

import os
import sys
import threading
import warnings
from collections.abc import Set

from fedkernels.internal import self_test_outcomes, self_test_process
from fedkernels.internal.self_test_outcomes import FAILED, NOT_TESTED, PASSED, Result

TIME_LIMIT = 120.0  # seconds, see fedkernels.self_test
# By operator and GPU, since the first use: do the kernels serve? Every call looks here, and nowhere else afterwards.
verdicts: dict[tuple[str, int], bool] = {}
_results: dict[int, dict[str, Result]] = {}  # by GPU, since the first use of any operator there
_lock = threading.RLock()


def is_off() -> bool:
    """Does the environment turn the test at first use off? All kernels serve then."""
    return os.environ.get("FEDKERNELS_SELF_TEST") == "0"


def verdict(operator: str, gpu: int, operators: Set[str]) -> bool:
    """Do the operator's kernels serve on this GPU? The first question there tests all `operators`; a no warns once."""
    with _lock:
        if (operator, gpu) not in verdicts:
            result = Result("", operator, PASSED) if is_off() else _result(operator, gpu, operators)
            verdicts[operator, gpu] = result.outcome == PASSED
            if result.outcome == FAILED:
                warnings.warn(
                    f"fedkernels.{operator} runs on its slower reference on cuda:{gpu} ({result.card}), where its CUDA "
                    f"kernels did not pass the self-test: {result.reason}. Please report this to the maintainers of "
                    "fedkernels with the output of `python -m fedkernels.self_test`.",
                    UserWarning,
                    stacklevel=6,
                )
        return verdicts[operator, gpu]


def known(gpu: int) -> dict[str, Result]:
    """By operator what is known of the kernels on this GPU. Tests nothing."""
    return _results[gpu] if gpu in _results else self_test_outcomes.load(self_test_outcomes.card_of(gpu))


def forget() -> None:
    """Lets the next use of each operator find out anew."""
    with _lock:
        verdicts.clear()
        _results.clear()


def _result(operator: str, gpu: int, operators: Set[str]) -> Result:
    if gpu not in _results:
        card = self_test_outcomes.card_of(gpu)
        found = self_test_outcomes.load(card)
        if operators - found.keys():
            with self_test_outcomes.one_at_a_time(card, TIME_LIMIT):
                found = self_test_outcomes.load(card)  # another process may have tested meanwhile
                if missing := operators - found.keys():
                    print(
                        f"fedkernels tests its CUDA kernels on {card.name} in a child process, once for this card, "
                        "driver and build. The first use waits for it.",
                        file=sys.stderr,
                        flush=True,
                    )
                    found = found | self_test_process.test(gpu, missing, TIME_LIMIT)
        _results[gpu] = found
        if untested := [result for result in found.values() if result.outcome == NOT_TESTED]:
            warnings.warn(
                f"{', '.join(result.operator for result in untested)} of fedkernels run on slower references on "
                f"cuda:{gpu} ({untested[0].card}) until this process ends, because their CUDA kernels could not be "
                f"tested: {untested[0].reason}. Run `python -m fedkernels.self_test` once on this machine while the "
                "GPU is free.",
                UserWarning,
                stacklevel=7,
            )
    return _results[gpu][operator]
