"""``pytest benchmarks``: our operators alone, for whoever changes a kernel. benchmarks/README.md says how.

The cases are those of ``python -m benchmarks``, which compares with peers. Times are by the host's clock, until the
device is done.
"""

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.case import Case
from benchmarks.measure import Settings

pytest.importorskip("pytest_benchmark", reason='install it with `pip install ".[benchmarks]"`')


def test_speed(benchmark: Any, operator: str, case: Case, settings: Settings) -> None:
    device = settings.torch_device()
    inputs, ours = case.inputs(device), case.implementations[0]
    benchmark.group = operator

    def call() -> None:
        ours.call(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        if case.reset is None:
            benchmark(call)
        else:  # a call changes its inputs
            benchmark.pedantic(call, setup=partial(case.reset, inputs), rounds=20, warmup_rounds=1)
    finally:
        torch.set_num_threads(before)
