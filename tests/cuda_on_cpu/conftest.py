import pytest

from tests.cuda_on_cpu.bindings import Bindings
from tests.cuda_on_cpu.emulation import CUDA, Compiler


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture(scope="session")
def bindings(compiler: Compiler) -> Bindings:
    kernels = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.cu"))}
    return Bindings(compiler.bindings("cuda_on_cpu", kernels), "cuda_on_cpu")
