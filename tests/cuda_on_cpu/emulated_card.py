"""A GPU for the self-test: the emulated kernels as the operators of tensors on the CPU, which count as CUDA's."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedkernels.internal import first_contact, native, self_test_outcomes, self_test_process
from fedkernels.internal.autograd import is_transformed
from tests.cuda_on_cpu.bindings import Bindings

LIBRARY = "cuda_on_cpu_self_test"
CARD = self_test_outcomes.Card("Emulated card", "9.0", "driver 1")


def test_here(gpu, operators, time_limit):
    """The test of the kernels without a child process, which is quicker."""
    cpu = torch.device("cpu")
    results = {name: self_test_process.run(name, cpu) for name in operators}
    return {name: self_test_outcomes.Result(CARD.name, name, *result) for name, result in results.items()}


def operator(name, *tensors):
    if is_transformed() or any(hasattr(tensor, "on_host") for tensor in tensors):
        return None
    serves = name in native.CUDA and native._serves(name, 0)
    return getattr(torch.ops.fedkernels, name).default if serves else None


def to_host(tensor):
    copy = tensor.detach().clone()
    copy.on_host = True
    return copy


class EmulatedCard(Bindings):
    def __init__(self, path: Path) -> None:
        super().__init__(path, LIBRARY)

    def plant(self, number: int) -> None:
        """Turns on the fault of this number; 0: none."""
        ctypes.c_int.in_dll(self.handle, "fedkernels_fault").value = number

    @contextmanager
    def in_use(self, *operators: str, test=test_here) -> Iterator[list[str]]:
        """The GPU 0 as a new process meets it, with these operators. -> the names of those that are called"""
        self.plant(0)
        module = SimpleNamespace(build_info=native.module.build_info, cuda_unusable=lambda gpu: "")
        with self.on_cuda() as called, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda one: not hasattr(one, "on_host")), raising=False)
            patch.setattr(torch.Tensor, "cpu", to_host)
            patch.setattr(native, "CUDA", frozenset(operators))
            patch.setattr(native, "operator", operator)
            patch.setattr(native, "runs_on", lambda gpu: True)
            patch.setattr(native, "module", module)
            patch.setattr(self_test_outcomes, "card_of", lambda gpu: CARD)
            patch.setattr(self_test_process, "_open", lambda gpu: torch.device("cpu"))
            patch.setattr(self_test_process, "_still_works", lambda device: True)
            patch.setattr(self_test_process, "test", test)
            patch.setattr(first_contact, "verdicts", {})
            patch.setattr(first_contact, "_results", {})
            yield called
