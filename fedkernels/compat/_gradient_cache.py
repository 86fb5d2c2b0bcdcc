"""The two passes of a loss of a large batch through a model that takes a mini-batch at a time.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import get_device_states, set_device_states

from fedkernels.compat._mini_batches import Features, mini_batch, ranges


def cached_loss(
    model: nn.Module, columns: list[Features], size: int, tokens: int | None, calculate: Callable[..., Tensor]
) -> Tensor:
    """Computes the loss of the embeddings of all columns; its backward pass runs the model once more.

    The first pass has no graph. `calculate` then forms the gradients in the embeddings. In the second pass each
    mini-batch runs with the random numbers and the autocast options of the first, so that both compute the same. What
    stays in memory from one pass to the other are the embeddings' gradients and these states.

    Args:
        model: its outputs hold "sentence_embedding", [rows, d].
        columns: the features of anchors, positives and so on.
        size: the samples of a mini-batch.
        tokens: the most tokens of a mini-batch, or None.
        calculate: ``calculate(embeddings, with_backward=True)`` computes the loss of lists of mini-batches' embeddings,
            one list for each column, and adds its gradients to theirs.

    Raises:
        ValueError: the model's forward pass is exchanged for the time of the first pass alone.
    """
    if exchanged_forward(model):  # it is taken back before the second pass, which would then train another model
        raise ValueError(
            "loss must not be a cached one inside AdaptiveLayerLoss, Matryoshka2dLoss or the MatryoshkaLoss of "
            "sentence-transformers before 6: they change the model for the first of its two passes alone. Use "
            "MultipleNegativesRankingLoss"
        )
    parts: list[_Part] = []
    embeddings: list[list[Tensor]] = []
    with torch.no_grad():
        for features in columns:
            embeddings.append([])
            for begin, end in ranges(features, size, tokens):
                part = _Part(model, features, begin, end)
                output = part.embedding()
                wide = torch.promote_types(output.dtype, torch.float32)  # half precision would round the gradients
                embeddings[-1].append(output.detach().to(wide))
                parts.append(part)
    if not torch.is_grad_enabled():
        return calculate(embeddings)
    for column in embeddings:
        for embedding in column:
            embedding.requires_grad_()
    loss = calculate(embeddings, with_backward=True).detach().requires_grad_()
    gradients = [embedding.grad for column in embeddings for embedding in column]
    loss.register_hook(lambda grad: _second_pass(model, parts, gradients, grad))
    return loss


class _Part:
    """A mini-batch of a column, with the state in which the model sees it for the first time."""

    def __init__(self, model: nn.Module, features: Features, begin: int, end: int) -> None:
        self.model, self.features, self.begin, self.end = model, features, begin, end
        self.cpu_state = torch.get_rng_state()
        tensors = [value for value in features.values() if isinstance(value, Tensor)]
        self.devices, self.device_states = get_device_states(*tensors)
        kind = "cuda" if self.devices else "cpu"
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.autocast: dict[str, Any] = {"device_type": kind, "dtype": dtype, "enabled": enabled}

    def embedding(self) -> Tensor:
        """[end - begin, d]; the model gets a new dict, as it writes its outputs into it."""
        output: Tensor = self.model(mini_batch(self.features, self.begin, self.end))["sentence_embedding"]
        return output

    def backward(self, gradient: Tensor) -> bool:
        """Runs the model with a graph and its backward pass; returns False if no weight of it is trained."""
        with torch.enable_grad(), self._restored(), torch.autocast(**self.autocast):
            output = self.embedding()
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


def _second_pass(model: nn.Module, parts: list[_Part], gradients: list[Any], grad: Tensor) -> None:
    """Adds `grad` times the loss's gradients to those of the model's weights.

    The ranks of DistributedDataParallel exchange gradients once, in the backward pass of the last mini-batch. If that
    one has no gradient, a mini-batch that has one runs again, with zeros.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    parallel = model if isinstance(model, DistributedDataParallel) else None
    trained: list[int] = []
    for index, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
        with nullcontext() if parallel is None else _exchange(parallel, last=index == len(parts) - 1):
            if part.backward(gradient * grad):
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


def exchanged_forward(model: nn.Module) -> set[str]:
    """Finds which of sentence-transformers' wrappers have given the model another forward function for a while."""
    names = {type(vars(module).get("forward")).__name__ for module in model.modules()}
    return names & {"ForwardDecorator", "TransformerDecorator"}
