"""Finds where the host waits for values of a GPU, in the emulation, where the tensors of both lie on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Operators whose result the host needs before it can go on: a number, or a shape that depends on the values.
READS = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten._linalg_check_errors),
    *(aten.nonzero, aten.masked_select, aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),
    *(aten.repeat_interleave, aten.bincount),
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Namespaces of operators within which calls are watched too: of the package, and of its emulated bindings.
OWN = ("fedkernels", "cuda_on_cpu")
WAITING = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)  # which have a function or method synchronize


class HostReadError(AssertionError):
    """The host reads what is on the GPU, or waits for it."""


class _Watch(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}  # of the GPU; kept, so that no address is used again
        self.binding: str | None = None  # the emulated C++ that runs
        self.seen_in_bindings: set[tuple[str, str]] = set()
        for tensor in inputs:
            self.put_on_gpu(tensor)

    def put_on_gpu(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage

    def is_on_gpu(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(self.is_on_gpu(tensor) for tensor in given)
        if self.binding is not None:
            self.seen_in_bindings.add((self.binding, str(func)))
        if on_gpu:
            self._refuse_reads(func, args, kwargs)
        result = self._call_watched(func, args, kwargs) if func.namespace.startswith(OWN) else func(*args, **kwargs)
        if on_gpu:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.put_on_gpu(tensor)
        return result

    def _refuse_reads(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        packet = func.overloadpacket
        if packet in READS:
            raise HostReadError(f"{func} waits for the GPU")
        if packet in INDEXING and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]):
            raise HostReadError(f"{func} with a mask waits for the GPU: how much it takes depends on the values")
        if packet is aten.copy_ and self.is_on_gpu(args[1]) and not self.is_on_gpu(args[0]):
            raise HostReadError("a copy from the GPU to the host waits for the GPU")
        # C++ has no other reason to name a device than to leave that of its tensors.
        if self.binding is not None and packet is aten._to_copy and kwargs.get("device") is not None:
            raise HostReadError("a copy from the GPU to another device waits for the GPU")

    def _call_watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the operator's implementation, in C++ or Python, such that this mode sees what that calls."""
        outer, self.binding = self.binding, str(func) if func.namespace.startswith(OWN[1]) else None
        try:
            with self:
                return func.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        finally:
            self.binding = outer


@contextmanager
def no_host_reads(inputs: Sequence[Tensor]) -> Iterator[_Watch]:
    """Raises HostReadError where the host waits for a GPU. On it are `inputs` and all that is computed from them."""
    watch = _Watch(inputs)

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # A device is the CPU in any case, as the GPU is emulated there. Only one that is written out is the host.
            to_host = name != "to" or "cpu" in (*(arg for arg in args if isinstance(arg, str)), kwargs.get("device"))
            if to_host and watch.is_on_gpu(tensor):
                raise HostReadError(f"Tensor.{name} waits for the GPU")
            return original(tensor, *args, **kwargs)

        return call

    def refuse(*_: Any, **__: Any) -> None:
        raise HostReadError("a synchronisation waits for the GPU")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("cpu", "numpy", "tolist", "to"):
            patch.setattr(Tensor, name, refusing(name, getattr(Tensor, name)))
        for owner in WAITING:
            patch.setattr(owner, "synchronize", refuse)
        patch.setattr(Tensor, "is_cuda", property(watch.is_on_gpu), raising=False)
        with watch:
            yield watch
