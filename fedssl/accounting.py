"""The memory and operations of a training step, counted while it is taken."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

#: passes that an active layer counts for: the backward pass counts as two forward passes (LW-FedSSL, appendix A.1)
ACTIVE = 3


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


#: by operator, a function of its arguments that counts; before version 2.15 torch does not count attention on the CPU
COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention, **flop_registry}


@dataclass(frozen=True)
class StepCost:
    """The memory of one training step, in bytes, and its operations.

    Attributes:
        parameters: with buffers and the target network's.
        activations: most that the forward pass keeps for the backward pass at one time.
        flops: floating-point operations by the paper's rule: operations count once without gradients and three times
            with gradients; twice where the weights are frozen and what comes before them trains. Layers before the
            first one that trains, such as a frozen stem, run without gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    flops: int

    @property
    def memory(self) -> int:
        """Return the peak memory in bytes; at the end of the forward pass all four exist together."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def structure(model: nn.Module) -> Hashable:
    """Return what a step's cost depends on in a model: modules, settings, modes, shapes, and what trains."""
    modules = tuple((name, type(m), m.extra_repr(), m.training) for name, m in model.named_modules())
    tensors = (*model.named_parameters(), *model.named_buffers())
    return modules, tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)


class StepCounter:
    """Counts one step: `with counter.forward():` around the losses, `counter.finish(optimizer)` after the step.

    Counting does not change the step: the hooks only read.

    Memory is that of tensors that outlive an operation. It includes neither what an operation needs while it runs nor
    what the allocator wastes, so a process needs somewhat more, nor a second model that a regularizer holds.

    Operations are those of matrix products, convolutions and attention (`torch.utils.flop_counter`). A multiply-add
    counts as two operations; the paper's GFLOPs count it as one. fedkernels' operators, norms and element-wise
    operations are not counted; together they are about one percent. `not_counted` are tensors that are no activations.
    """

    def __init__(self, model: nn.Module, not_counted: Sequence[Tensor] = ()):
        self._model, self._not_counted = model, not_counted
        self._live: Counter[int] = Counter()
        self._bytes = self._peak = 0
        self.flops = 0  # of the last counted forward pass

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the operations in the body, and the tensors that it keeps for the backward pass."""
        self._own = {_address(t) for t in (*self._model.parameters(), *self._model.buffers(), *self._not_counted)}
        operations = _ForwardOperations()
        with operations, saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor):
            yield
        self.flops = operations.flops

    def finish(self, optimizer: torch.optim.Optimizer) -> StepCost:
        """Return the cost of the step; call it after the backward pass and the update."""
        parameters = list(self._model.parameters())
        held = _total([*parameters, *self._model.buffers()])
        gradients = _total([p.grad for p in parameters if p.grad is not None])
        state = _total([t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)])
        return StepCost(held, gradients, state, activations=self._peak, flops=self.flops)

    def _add(self, address: int, size: int) -> None:
        self._live[address] += 1
        if self._live[address] == 1:
            self._bytes += size
            self._peak = max(self._peak, self._bytes)

    def _remove(self, address: int, size: int) -> None:
        self._live[address] -= 1
        if self._live[address] == 0:
            self._bytes -= size


class _Kept:
    """A tensor that autograd keeps; its storage counts as long as a kept tensor uses it."""

    def __init__(self, counter: StepCounter, tensor: Tensor):
        self.tensor = tensor.detach()  # with its graph the tensor would keep itself alive
        self._counter = None if _address(tensor) in counter._own else counter
        self._storage = _address(tensor), tensor.untyped_storage().nbytes()
        if self._counter is not None:
            self._counter._add(*self._storage)

    def __del__(self) -> None:
        if self._counter is not None:
            self._counter._remove(*self._storage)


class _ForwardOperations(TorchDispatchMode):
    """Sums the operations of a forward pass; those that need a backward pass count `ACTIVE` times."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = COUNTED.get(func.overloadpacket)
        if count is not None:
            # The mode alone does not show it: a frozen stem runs with gradients enabled and needs none.
            needed = [v.requires_grad for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() > 1]
            # without the gradient of frozen weights, which are the last factor; after attention's third may be a mask
            passes = ACTIVE if needed[:3][-1] else ACTIVE - 1
            differentiated = torch.is_grad_enabled() and any(needed)
            self.flops += int(count(*args, **kwargs, out_val=result)) * (passes if differentiated else 1)
        return result


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _total(tensors: list[Tensor]) -> int:
    """Return the bytes of the tensors' storages; a shared storage counts once."""
    return sum({_address(t): t.untyped_storage().nbytes() for t in tensors}.values())
