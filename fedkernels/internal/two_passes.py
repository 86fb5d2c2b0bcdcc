"""The two passes of a model that takes a large batch a mini-batch at a time: without a graph, then with one.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states


class Part:
    """A mini-batch, with the random numbers and the autocast options with which the model sees it first.

    Args:
        run: runs the model on the mini-batch; called once for each pass.
        tensors: what tells the devices that the model runs on.
    """

    def __init__(self, run: Callable[[], Tensor], tensors: Iterable[Tensor]) -> None:
        self.run = run
        tensors = list(tensors)
        self.cpu_state = torch.get_rng_state()
        self.devices, self.device_states = get_device_states(*tensors)
        kinds = [tensor.device.type for tensor in tensors]
        kind = next((one for one in kinds if one not in ("cpu", "meta")), "cpu")  # autocast knows no meta device
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # Without autocast's cache of rounded weights: older torch gives those of a pass without a graph to later ones,
        # which then have no gradient.
        self.autocast: dict[str, Any] = {"device_type": kind, "dtype": dtype, "enabled": enabled}
        self.autocast["cache_enabled"] = False

    def forward(self) -> Tensor:
        """Runs the model without a graph; the result is at least float32, as half precision would round gradients."""
        with torch.no_grad(), torch.autocast(**self.autocast):
            output = self.run()
        return output.detach().to(torch.promote_types(output.dtype, torch.float32))

    def backward(self, gradient: Tensor) -> bool:
        """Runs the model with a graph and its backward pass; returns False if no weight of it is trained."""
        with torch.enable_grad(), self._restored(), torch.autocast(**self.autocast):
            output = self.run()
        if output.requires_grad:
            torch.autograd.backward(output, gradient.to(output.dtype))
        return output.requires_grad

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """A context in which the random number generators have their states of before; after it, those of now."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu_state)
            set_device_states(self.devices, self.device_states)
            yield


def second_pass(model: object, parts: Sequence[Part], gradients: Sequence[Tensor]) -> None:
    """Adds the gradients of the model's weights, given those of the parts' outputs.

    The ranks of DistributedDataParallel exchange gradients once, in the backward pass of the last mini-batch. If that
    one has no gradient, a mini-batch that has one runs again, with zeros.

    Raises:
        RuntimeError: the gradients are to have derivatives themselves: they would be taken for constants.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("there is no second derivative through two passes of a model: leave create_graph False")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    parallel = model if isinstance(model, DistributedDataParallel) else None
    trained: list[int] = []
    for index, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
        with nullcontext() if parallel is None else _exchange(parallel, last=index == len(parts) - 1):
            if part.backward(gradient):
                trained.append(index)
    if parallel is not None and parallel.require_backward_grad_sync and trained and trained[-1] < len(parts) - 1:
        parts[trained[-1]].backward(torch.zeros_like(gradients[trained[-1]]))


@contextmanager
def _exchange(parallel: DistributedDataParallel, last: bool) -> Iterator[None]:
    """A context in which the ranks exchange gradients in the last mini-batch, unless the user has turned that off.

    A static graph is learned in an exchange, so its first mini-batch needs one too.
    """
    before = parallel.require_backward_grad_sync
    learns = parallel.static_graph and not parallel._static_graph_delay_allreduce_enqueued
    parallel.require_backward_grad_sync = learns or (before and last)
    try:
        yield
    finally:
        parallel.require_backward_grad_sync = before
