"""The test of all CUDA kernels on this machine's GPUs, in child processes. `python -m fedkernels.self_test` runs it."""

from collections.abc import Sequence

import torch

from fedkernels.internal import first_contact, native, self_test_outcomes, self_test_process
from fedkernels.internal.self_test_outcomes import Card, Result


def self_test(*, time_limit: float = first_contact.TIME_LIMIT) -> list[Result]:
    """Tests the CUDA kernels of every operator on each kind of GPU that is visible, and prints a table.

    Small fixed inputs of ragged sizes and of every dtype, batches and gradients are compared with the references in
    float64 on the CPU. The test runs in a child process: a crash or an illegal address ends that process alone,
    and the time limit ends kernels that hang. Such an operator failed, and another child process tests the rest.

    The first use of an operator on a GPU runs the same test where none was kept, and waits for it. This function reuses
    nothing from earlier tests. The outcomes are kept for the card, the driver and the build in
    ``$XDG_CACHE_HOME/fedkernels`` or ``~/.cache/fedkernels``, and hold for this process, too: an operator that fails
    runs on its reference from then on.

    Args:
        time_limit: seconds for the test of an operator. A child process may take as long to start, and 120 s at least.

    Returns:
        One result for each operator and kind of GPU; an empty list if no CUDA kernels can run here.
    """
    results = [result for gpu in _gpus() for result in self_test_process.test(gpu, native.CUDA, time_limit).values()]
    first_contact.forget()
    print(table(results))
    return results


def table(results: Sequence[Result]) -> str:
    """The results as text, or why there are none."""
    if not results:
        compiled, used = (native.build_info().get(key, "none") for key in ("cuda_compiled", "cuda_used"))
        return f"No CUDA kernels to test: compiled for {compiled}; GPUs: {used}."
    lines = [("card", "operator", "outcome", "time", "reason")]
    lines += [(one.card, one.operator, one.outcome, f"{one.seconds:.1f} s", one.reason) for one in results]
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
