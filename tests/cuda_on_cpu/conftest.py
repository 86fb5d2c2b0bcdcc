from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedkernels.internal import linear_cka_cuda, native
from tests.cuda_on_cpu.emulated_linear_cka import COMBINE, PREPARE, EmulatedOperators
from tests.cuda_on_cpu.emulation import Compiler, require_compiler


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    require_compiler()
    return Compiler(Path(tmp_path_factory.mktemp("cuda_on_cpu")))


@pytest.fixture
def emulated_linear_cka(compiler: Compiler, request: pytest.FixtureRequest) -> Iterator[EmulatedOperators]:
    """Registers the emulated operators for tensors on the CPU until the test ends.

    The fixture's parameter, if any, is a fault to plant: the file, the text in it, and what replaces that text.
    """
    if native.module is None:
        pytest.skip("the operators are declared by fedkernels._C, which is not compiled")
    faulty, *fault = getattr(request, "param", [None])
    prepare, combine = (
        compiler.mutant(source, *fault) if source == faulty else compiler.load(source) for source in (PREPARE, COMBINE)
    )
    operators = EmulatedOperators(prepare, combine)
    with torch.library._scoped_library("fedkernels", "IMPL") as registered:
        for name in native.PARTS:
            registered.impl(name, getattr(operators, name), "CPU")
        registered.impl("linear_cka", linear_cka_cuda.linear_cka, "CPU")
        yield operators
