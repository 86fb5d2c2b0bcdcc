import pytest

from tests.cuda_on_cpu.bindings import Bindings
from tests.cuda_on_cpu.emulated_card import LIBRARY, EmulatedCard
from tests.cuda_on_cpu.emulation import CUDA, Compiler
from tests.cuda_on_cpu.planted_faults import faulty_kernels


@pytest.fixture(scope="session")
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture(scope="session")
def bindings(compiler: Compiler) -> Bindings:
    kernels = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CUDA.glob("*.cu"))}
    return Bindings(compiler.bindings("cuda_on_cpu", kernels), "cuda_on_cpu")


@pytest.fixture(scope="session")
def card(compiler: Compiler) -> EmulatedCard:
    """With all planted faults, which are off."""
    return EmulatedCard(compiler.bindings(LIBRARY, faulty_kernels()))
