"""A GPU for the self-test: the emulated kernels as the operators of tensors on the CPU, which count as CUDA's.

`python -m tests.cuda_on_cpu.emulated_card LIBRARY FAULT GPU OPERATOR...` is the child process of the self-test with the
emulated kernels of the file LIBRARY.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fedkernels.internal import first_contact, native, self_test_outcomes, self_test_process
from fedkernels.internal.autograd import is_transformed
from tests.cuda_on_cpu.test_bindings import SOURCES, Bindings

LIBRARY = "cuda_on_cpu_self_test"
CARD = self_test_outcomes.Card("Emulated card", "9.0", "driver 1")


class Compiled:
    """In the place of a compiler: what it compiled before."""

    def __init__(self, path: str) -> None:
        self.path = path

    def bindings(self, text: str, name: str, kernels: str) -> ctypes.CDLL:
        return ctypes.CDLL(self.path)


def test_here(gpu, operators, time_limit):
    """The test of the kernels without a child process, which is quicker."""
    cpu = torch.device("cpu")
    results = {name: self_test_process.run(name, cpu) for name in operators}
    return {name: self_test_outcomes.Result(CARD.name, name, *result) for name, result in results.items()}


class EmulatedCard:
    def __init__(self, compiler) -> None:
        self.bindings = Bindings(compiler, [path.read_text(encoding="utf-8") for path in SOURCES], LIBRARY)
        self.path = self.bindings.handle._name

    def plant(self, number: int) -> None:
        """Turns on the fault of this number; 0: none."""
        ctypes.c_int.in_dll(self.bindings.handle, "fedkernels_fault").value = number

    @contextmanager
    def in_use(self, *operators: str, test=test_here) -> Iterator[list[str]]:
        """The GPU 0 as a new process meets it, with these operators. -> the names of those that are called"""

        def operator(name, *tensors):
            if is_transformed() or any(hasattr(tensor, "on_host") for tensor in tensors):
                return None
            serves = name in native.CUDA and native._serves(name, 0)
            return getattr(torch.ops.fedkernels, name).default if serves else None

        def to_host(tensor):
            copy = tensor.detach().clone()
            copy.on_host = True
            return copy

        self.plant(0)
        with self.bindings.on_cuda() as called, pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.Tensor, "is_cuda", property(lambda tensor: not hasattr(tensor, "on_host")), raising=False
            )
            patch.setattr(torch.Tensor, "cpu", to_host)
            patch.setattr(native, "CUDA", frozenset(operators))
            patch.setattr(native, "operator", operator)
            patch.setattr(native, "runs_on", lambda gpu: True)
            patch.setattr(native, "module", Module())
            patch.setattr(self_test_outcomes, "card_of", lambda gpu: CARD)
            patch.setattr(self_test_process, "_open", lambda gpu: torch.device("cpu"))
            patch.setattr(self_test_process, "_still_works", lambda device: True)
            patch.setattr(self_test_process, "test", test)
            patch.setattr(first_contact, "verdicts", {})
            patch.setattr(first_contact, "_results", {})
            yield called


class Module:
    """fedkernels._C of a machine with one GPU."""

    def __init__(self) -> None:
        self.build_info = native.module.build_info

    def cuda_unusable(self, gpu: int) -> str:
        return ""


if __name__ == "__main__":
    path, fault, gpu, *operators = sys.argv[1:]
    card = EmulatedCard(Compiled(path))
    with card.in_use():
        card.plant(int(fault))
        self_test_process.run_as_child(int(gpu), operators)
