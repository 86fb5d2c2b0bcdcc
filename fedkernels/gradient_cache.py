"""A large batch through an encoder that takes a mini-batch at a time, for losses that need the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedkernels.internal import checks
from fedkernels.internal.autograd import has_tangent
from fedkernels.internal.two_passes import Part, second_pass


class GradientCache:
    """Encodes a large batch in the memory of a mini-batch; any loss of the whole batch may follow.

    A call runs the encoder on one mini-batch after another without a graph, and returns the embeddings of all. When the
    backward pass of the loss reaches them, the encoder runs each mini-batch once more, with a graph, and adds the
    gradients of its weights to their ``grad``. Both runs have the same random numbers and the same autocast, so that
    dropout is the same in both. The gradients are those of the whole batch. The price is one more forward pass.

    Call ``backward()``: ``torch.autograd.grad`` gives no gradients of the encoder's weights. Give all inputs of an
    encoder to one call: the ranks of DistributedDataParallel then exchange gradients once, in the last mini-batch.

    BatchNorm in training mode takes its statistics from mini-batches, each twice, so the embeddings and gradients are
    not those of the whole batch. There are no second derivatives and no forward mode, and ``torch.func`` is not
    supported: each raises a RuntimeError.

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).

    Args:
        encoder: a module, or a function, that takes one input and returns one tensor [n, ...], a row for each sample.
            The weights of a module, its method or a partial of either tell its device; those of a module alone, whether
            they changed between the passes. Any other function needs a batch on the encoder's device.
        mini_batch_size: the samples that the encoder takes at a time.

    Raises:
        TypeError: mini_batch_size is no integer.
        ValueError: mini_batch_size < 1.
    """

    def __init__(self, encoder: Callable[[Any], Tensor], mini_batch_size: int) -> None:
        self.encoder = encoder
        self.mini_batch_size = checks.integer("mini_batch_size", mini_batch_size)
        if self.mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1, got {checks.short(mini_batch_size)}")

    def __call__(self, *inputs: Any) -> Any:
        """Encodes one or more inputs.

        Args:
            inputs: tensors [B, ...], or dicts, lists or tuples that hold such. Tensors without dimensions, and what is
                no tensor, go to the encoder as they are. B may differ from input to input. A tensor that requires a
                gradient gets it if it is a leaf.

        Returns:
            the embeddings [B, ...] of one input, or a tuple of those of several, in the encoder's dtype, but at least
            float32.

        Raises:
            ValueError: an input has no rows, tensors with different numbers of rows, or a tensor that was computed
                from others and requires a gradient; the encoder's output has another number of rows.
            TypeError: the encoder returns something other than a tensor.
            RuntimeError: in the backward pass, if weights of the encoder or inputs were changed after this call.
        """
        if not inputs:
            raise ValueError("inputs must hold at least one input of the encoder, got none")
        counts = [_rows(f"inputs[{index}]", given) for index, given in enumerate(inputs)]
        if has_tangent(*_tensors(inputs), *_weights(_owner(self.encoder))):
            raise RuntimeError("GradientCache has no forward mode: autograd would take the derivative for zero")
        start = torch.empty(0, requires_grad=True)  # autograd calls a backward pass for inputs with a gradient alone
        embeddings = _Encoding.apply(self, inputs, counts, start)
        return embeddings if len(inputs) > 1 else embeddings[0]

    def _part(self, given: Any, begin: int, end: int) -> Part:
        tensors = _tensors(given) + _weights(_owner(self.encoder))  # it may move its input to their device
        return Part(lambda: self._encode(_cut(given, begin, end), end - begin), tensors)

    def _encode(self, mini_batch: Any, rows: int) -> Tensor:
        output = self.encoder(mini_batch)
        if not isinstance(output, Tensor):
            raise TypeError(f"encoder must return one torch.Tensor, got {type(output).__name__}")
        if output.ndim == 0 or len(output) != rows:
            raise ValueError(f"encoder must return {rows} rows for {rows} samples, got shape {list(output.shape)}")
        return output


class _Encoding(torch.autograd.Function):
    """The embeddings of all inputs; the backward pass is the second pass of all mini-batches."""

    @staticmethod
    def forward(ctx: Any, cache: GradientCache, inputs: Sequence[Any], counts: list[int], start: Tensor) -> Any:
        ctx.encoder, ctx.size, ctx.parts, embeddings = cache.encoder, cache.mini_batch_size, [], []
        for given, rows in zip(inputs, counts, strict=True):
            parts = [cache._part(given, begin, min(begin + ctx.size, rows)) for begin in range(0, rows, ctx.size)]
            embeddings.append(torch.cat([part.forward() for part in parts]))
            ctx.parts += parts
        ctx.save_for_backward(start)  # torch frees it together with the graph
        ctx.inputs = _tensors(inputs)
        ctx.versions = _versions(_weights(ctx.encoder)), _versions(ctx.inputs)
        return tuple(embeddings)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # in a second pass of a graph that was not retained this is torch's error
        found = _versions(_weights(ctx.encoder)), _versions(ctx.inputs)
        if found != ctx.versions:
            what = "inputs" if found[0] == ctx.versions[0] else "weights of the encoder"
            raise RuntimeError(
                f"{what} were changed between GradientCache's two passes: call backward() before the optimizer's step "
                "and before anything writes into the inputs"
            )
        second_pass(ctx.encoder, ctx.parts, [rows for gradient in gradients for rows in gradient.split(ctx.size)])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.parts = ctx.inputs = None  # they hold the inputs, and the loss holds them
        return None, None, None, None


def _owner(encoder: Any) -> Any:
    """The module of a method, also in a partial; which of its weights the method uses is not known."""
    encoder = encoder.func if isinstance(encoder, partial) else encoder
    return getattr(encoder, "__self__", encoder)


def _weights(encoder: object) -> list[Tensor]:
    return list(encoder.parameters()) if isinstance(encoder, nn.Module) else []


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written into; tensors of the inference mode do not count it."""
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _tensors(given: Any) -> list[Tensor]:
    """All tensors of an input."""
    if isinstance(given, Tensor):
        return [given]
    held = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    return [tensor for value in held for tensor in _tensors(value)]


def _rows(name: str, given: Any) -> int:
    """The number of samples of an input."""
    tensors = [tensor for tensor in _tensors(given) if tensor.ndim > 0]
    counts = sorted({len(tensor) for tensor in tensors})
    if len(counts) != 1 or counts[0] == 0:
        raise ValueError(f"{name} must hold tensors with one row for each sample, got {counts or 'none'} rows")
    if any(tensor.requires_grad and not tensor.is_leaf for tensor in tensors):
        raise ValueError(
            f"{name} must not be computed from tensors that require a gradient: detach it, or make that part of encoder"
        )
    return counts[0]


def _cut(given: Any, begin: int, end: int) -> Any:
    """Copies the samples `begin` to `end`, so that nothing that an encoder writes into its input stays there."""
    if isinstance(given, Tensor):
        return given[begin:end].clone() if given.ndim > 0 else given
    if isinstance(given, Mapping):
        return {name: _cut(value, begin, end) for name, value in given.items()}
    if isinstance(given, list | tuple):
        parts = [_cut(value, begin, end) for value in given]
        # A named tuple takes them singly.
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given
