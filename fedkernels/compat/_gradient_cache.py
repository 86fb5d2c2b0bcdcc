"""A cached loss as sentence-transformers' wrappers expect it; `fedkernels.GradientCache` is for everything else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkernels.compat._mini_batches import Features, mini_batch, ranges
from fedkernels.internal.two_passes import Part, second_pass


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
    parts: list[Part] = []
    embeddings: list[list[Tensor]] = []
    for features in columns:
        embeddings.append([])
        for begin, end in ranges(features, size, tokens):
            parts.append(_part(model, features, begin, end))
            embeddings[-1].append(parts[-1].forward())
    if not torch.is_grad_enabled():
        return calculate(embeddings)
    for column in embeddings:
        for embedding in column:
            embedding.requires_grad_()
    loss = calculate(embeddings, with_backward=True).detach().requires_grad_()
    gradients: list[Any] = [embedding.grad for column in embeddings for embedding in column]
    loss.register_hook(lambda grad: second_pass(model, parts, [gradient * grad for gradient in gradients]))
    return loss


def _part(model: nn.Module, features: Features, begin: int, end: int) -> Part:
    """Samples `begin` to `end` of a column; the model gets a new dict, as it writes its outputs into it."""
    tensors = [value for value in features.values() if isinstance(value, Tensor)]
    return Part(lambda: model(mini_batch(features, begin, end))["sentence_embedding"], tensors)


def exchanged_forward(model: nn.Module) -> set[str]:
    """Finds which of sentence-transformers' wrappers have given the model another forward function for a while."""
    names = {type(vars(module).get("forward")).__name__ for module in model.modules()}
    return names & {"ForwardDecorator", "TransformerDecorator"}
