"""The operators for CUDA, of csrc/ops/*_cuda.cpp and Python, on the emulated kernels and for tensors on the CPU."""

import ctypes
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from fedkernels.internal import checks, contrastive_cuda, linear_cka_cuda, native, transport_warnings
from tests.cuda_on_cpu.emulation import OPS, ORDERS, assert_same, set_up
from tests.cuda_on_cpu.host_reads import no_host_reads

# What fedkernels/linear_cka.py and fedkernels/internal/contrastive.py register for CUDA.
IN_PYTHON = {
    **contrastive_cuda.OPERATORS,
    "linear_cka": linear_cka_cuda.linear_cka,
    "linear_cka_to_kernel": linear_cka_cuda.linear_cka_to_kernel,
    "linear_cka_pairwise": linear_cka_cuda.linear_cka_pairwise,
}


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """What a copy that nobody waits for brings to the host: `no_host_reads` does not see it."""
    with _disable_current_modes():
        return tensor.clone()


class Bindings:
    """The operators of a library that was compiled by Compiler.bindings, which are torch.ops.<library>'s."""

    def __init__(self, path: Path, library: str) -> None:
        if native.module is None:
            pytest.skip("the operators are declared by fedkernels._C, which is not compiled")
        texts = [source.read_text(encoding="utf-8") for source in OPS.glob("*_cuda.cpp")]
        names = [name for text in texts for name in re.findall(r'm\.impl\("(\w+)"', text)]
        self.declared = torch.library.Library(library, "FRAGMENT")
        for name in names:
            self.declared.define(name + native.SCHEMAS[name])
        self.handle = ctypes.CDLL(str(path))
        self.operators = {name: getattr(getattr(torch.ops, library), name).default for name in names}
        self.arrival = Mock(**{"query.return_value": True})  # of what is copied to the host meanwhile

    @contextmanager
    def on_cuda(self, order: tuple[int, bool] = ORDERS[0], **device: int) -> Iterator[list[str]]:
        """Tensors on the CPU count as CUDA's, and fedkernels' operators are these. -> the names of those called

        Those for the CPU alone are not found, as on a GPU.
        """
        set_up(self.handle, order, **device)
        called: list[str] = []
        operator_of = native.operator

        def noting(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                called.append(name)
                return operator(*arguments)

            return call

        on_the_cpu = torch.library.get_kernel("fedkernels::unbalanced_ot", "CPU")

        def transport(*arguments: Any) -> Any:
            """The self-test's truths are the real CPU's."""
            if arguments[-1] == "interior_point":
                return on_the_cpu.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments)
            return self.operators["unbalanced_ot"](*arguments)

        def operator(name: str, *tensors: torch.Tensor) -> object:
            return None if name in native.CPU_ONLY else operator_of(name, *tensors)

        with torch.library._scoped_library("fedkernels", "IMPL") as registered, pytest.MonkeyPatch.context() as patch:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*verriding a previously registered kernel")
                for name, one in {**self.operators, **IN_PYTHON, "unbalanced_ot": transport}.items():
                    registered.impl(name, noting(name, one), "CPU")
            patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
            patch.setattr(native, "CUDA", frozenset({*native.COMPILED} - native.CPU_ONLY))
            patch.setattr(checks, "has_values", lambda tensor: False)
            patch.setattr(transport_warnings, "_unread", None)
            patch.setattr(transport_warnings, "_is_captured", lambda gpu: False)
            patch.setattr(transport_warnings, "_copy_to_host", lambda facts: (host_copy(facts), self.arrival))
            patch.setattr(native, "operator", operator)
            yield called

    def results(self, call: Callable[..., Any], *inputs: Any, **device: int) -> Any:
        """call(*inputs) in each order of the threads, on a device like this; -> its tensors, which must be equal.

        Meanwhile the host must not wait for values.
        """
        found, given = [], [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        for order in ORDERS:
            with self.on_cuda(order, **device) as called, no_host_reads(given):
                found.append(call(*inputs))
            assert called
        assert_same(*found)
        return found[0]
