"""The two views of a batch pass through a network at a time, each in a thread of its own with half of the threads.

A second thread within the operators of a small network gains little, as most of them are too short to be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..errors import UserError

_AVERAGES = ("running_mean", "running_var")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
#: passes a view through networks that are applied one after another; gives the outputs of some or all of them
Run = Callable[[nn.ModuleDict, Tensor], tuple[Tensor, ...]]


@contextmanager
def view_threads(*chains: nn.ModuleDict) -> Iterator[ViewThreads | None]:
    """Let two views pass through chains of networks at the same time in the body; yield None if they cannot.

    They cannot off the CPU, with a single thread of torch, or where a pass depends on those before it. Two runs with
    the same number of threads are bit-identical.
    """
    threads = torch.get_num_threads()
    on_cpu = all(parameter.device.type == "cpu" for chain in chains for parameter in chain.parameters())
    if threads < 2 or not on_cpu or any(map(_keeps_an_order, chains)):
        yield None
        return
    try:
        with ThreadPoolExecutor(1, "second-view") as executor:
            yield ViewThreads(executor, threads // 2, chains)
    finally:
        torch.set_num_threads(threads)


def _keeps_an_order(chain: nn.Module) -> bool:
    """Return whether a layer draws random numbers, or has running statistics that are no exponential averages."""
    for module in chain.modules():
        dropped = module.p if isinstance(module, _DropoutNd) else getattr(module, "drop_prob", None)  # timm's DropPath
        batch_norm = isinstance(module, _BatchNorm)
        averages = module.momentum is not None if batch_norm else getattr(module, "running_var", None) is None
        if dropped or not averages:
            return True
    return False


class ViewThreads:
    """Runs the passes of two views, and their backward passes, at the same time.

    From its first pass on, this thread has only `threads` threads for its operators, and the second one has as many:
    threads that wait for an operator's next share keep a processor busy, which the other view's pass needs.
    """

    def __init__(self, executor: ThreadPoolExecutor, threads: int, chains: Sequence[nn.ModuleDict]):
        #: False runs the second view after the first one, in this thread and with the same results: for hooks and modes
        #: of torch, which belong to a thread
        self.at_a_time = True
        self._used = False
        self._executor, self._threads = executor, threads
        self._chains, self._twins = chains, dict[nn.ModuleDict, _Twin]()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a model's copy has networks of its own

    def passes(self, chain: nn.ModuleDict, views: Sequence[Tensor], run: Run) -> list[tuple[Tensor, ...]]:
        """Return `run(chain, view)` for each of two views; running statistics see the first view first.

        Gradients reach the chain's parameters, not the views, and have no derivatives of their own.
        """
        torch.set_num_threads(self._threads)  # the second thread takes this over with its first operator
        self._used = True
        twin = self._twin(chain)
        twin.start()
        calls = (lambda: run(chain, views[0]), lambda: run(twin.chain, views[1]))
        parameters = [parameter for parameter in chain.parameters() if parameter.requires_grad]
        if torch.is_grad_enabled() and parameters:
            flat: tuple[Tensor, ...] = _Passes.apply(self, calls, *parameters)
            half = len(flat) // 2
            outputs = [flat[:half], flat[half:]]
        else:
            outputs = self.both(calls)
        twin.finish()
        return outputs

    def statistics(self) -> list[Tensor]:
        """Return the running statistics that the second view's passes begin with."""
        return [tensor for chain in self._chains for tensor in self._twin(chain).statistics()]

    @property
    def idle_thread(self) -> Executor | None:
        """Return the second thread, for work between two steps, or None if this thread still has all threads."""
        return self._executor if self._used and self.at_a_time else None

    def _twin(self, chain: nn.ModuleDict) -> _Twin:
        if chain not in self._twins:
            self._twins[chain] = _Twin(chain)
        return self._twins[chain]

    def both(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of two functions; the second one runs in the other thread."""
        first, second = (partial(_in_own_thread, call, torch.is_grad_enabled()) for call in calls)
        if not self.at_a_time:
            return [first(), second()]
        other: Future[Any] = self._executor.submit(second)
        try:
            result = first()
        finally:
            wait([other])
        return [result, other.result()]


def _in_own_thread(call: Callable[[], Any], gradients: bool) -> Any:
    """Make a call with the other thread's setting of gradients, and without sharing its cast weights."""
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", enabled=False, cache_enabled=False):
        return call()


class _Passes(torch.autograd.Function):
    """Two views' passes as one operation, so that their backward passes run at a time too."""

    @staticmethod
    def forward(ctx: Any, threads: ViewThreads, calls: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            ctx.outputs = threads.both(calls)
        ctx.threads, ctx.parameters = threads, parameters
        pairs = [(output, output.detach()) for outputs in ctx.outputs for output in outputs]
        ctx.mark_non_differentiable(*(plain for output, plain in pairs if not output.requires_grad))
        return tuple(plain for _, plain in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # the gradients are to have derivatives: they would be taken for constants
            raise UserError(
                "two views that pass through networks at a time have no second derivative: leave create_graph False, "
                "or train with one thread (OMP_NUM_THREADS=1)"
            )
        half = len(gradients) // 2
        views = zip(ctx.outputs, (gradients[:half], gradients[half:]), strict=True)
        calls = [partial(_backward, outputs, arrived, ctx.parameters) for outputs, arrived in views]
        pairs = zip(*ctx.threads.both(calls), strict=True)
        return (None, None, *(b if a is None else a if b is None else a + b for a, b in pairs))


def _backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None]
    if not pairs:
        return [None] * len(parameters)
    return torch.autograd.grad([o for o, _ in pairs], parameters, [g for _, g in pairs], allow_unused=True)


class _Twin:
    """A copy of a chain that shares parameters and hooks but has its own BatchNorm statistics.

    Twin BatchNorms use momentum 1: after a pass their running statistics equal the batch's. A network may register
    hooks during its pass, as StagedEncoder does: these do not run in the other view's pass.
    """

    def __init__(self, chain: nn.ModuleDict):
        self._layers: list[tuple[_BatchNorm, _BatchNorm, dict[str, Tensor | None]]] = []  # original, twin, twin's own
        self._twins: dict[nn.Module, Any] = {}
        self.chain: nn.ModuleDict = self._twin(chain)

    def _twin(self, module: nn.Module) -> Any:
        if module in self._twins:
            return self._twins[module]
        twin = self._twins[module] = module.__new__(type(module))
        twin.__dict__ = module.__dict__.copy()
        for hooks in _HOOKS:
            twin.__dict__[hooks] = module.__dict__[hooks].copy()
        children = module._modules.items()
        twin._modules = {name: child if child is None else self._twin(child) for name, child in children}
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            own = {name: torch.zeros_like(buffer) for name, buffer in module.named_buffers()}
            self._layers.append((module, twin, own))  # type: ignore[arg-type]
        return twin

    def statistics(self) -> Iterator[Tensor]:
        for _, _, own in self._layers:
            yield from (tensor for tensor in own.values() if tensor is not None)

    def start(self) -> None:
        """Take over the hooks and how the layers normalise now: the caller may have changed them."""
        for module, copied in self._twins.items():
            for hooks in _HOOKS:
                if module.__dict__[hooks] or copied.__dict__[hooks]:
                    copied.__dict__[hooks] = module.__dict__[hooks].copy()
        for original, twin, own in self._layers:
            moving = original.training and original.track_running_stats
            twin.__dict__.update(  # `Module.__setattr__` takes ten times as long
                training=original.training,
                track_running_stats=original.track_running_stats,
                momentum=1.0,
                _buffers=own if moving else original._buffers,
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Add what the twins have seen to the original layers' statistics."""
        for original, twin, own in self._layers:
            if twin._buffers is own:  # not the original's, which this pass does not change
                for name in _AVERAGES:
                    _data(original, name).lerp_(_data(twin, name), original.momentum or 0.0)
                _data(original, "num_batches_tracked").add_(1)


def _data(batch_norm: _BatchNorm, name: str) -> Tensor:
    """Return `.data`, to bypass autograd's version check: in training mode no backward pass reads these statistics."""
    buffer = batch_norm._buffers[name]
    assert buffer is not None
    return buffer.data
