"""A plugin with which the operators' tests for a GPU run on the emulated kernels, where there is no GPU.

    python -m pytest -p tests.cuda_on_cpu.as_a_gpu tests/fedkernels/test_contrastive.py -m gpu

It takes minutes a file and is no part of any other run. Autocast, memory that is changed later and `test_cuda.py` need
a real GPU: the emulation's tensors are the CPU's own.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cuda_on_cpu.bindings import Bindings
from tests.cuda_on_cpu.emulation import CUDA, Compiler
from tests.fedkernels import conftest as of_operators


def _where_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    return call


of_operators.need_gpu = lambda: None
of_operators.on_gpu = _where_it_is


@functools.cache
def _bindings() -> Bindings:
    kernels = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.cu"))}
    return Bindings(Compiler().bindings("cuda_on_cpu", kernels), "cuda_on_cpu")


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest, implementation: None) -> Iterator[None]:
    if not of_operators.is_on_gpu(request):
        yield
        return
    with _bindings().on_cuda():
        yield
