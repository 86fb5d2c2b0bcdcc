"""Hetero-SSFL's proximal term: align the representations of public images by linear CKA."""

from collections.abc import Callable
from typing import Any

from pydantic import Field
from torch import Tensor

from fedkernels import linear_cka, linear_cka_to_kernel

from ..aggregators.representation_mean import FACTOR, KERNEL, WHITENING
from ..client import LocalRound
from ..data.batches import endless_batches
from ..data.pixels import normalize
from ..models.model import untouched_running_statistics
from ..objectives.base import Step
from .base import Regularizer, StepLoss


def term_of_public_images(
    local: LocalRound, batch_size: int, purpose: str, compare: Callable[[Tensor, Tensor, bool], Tensor]
) -> StepLoss:
    """Return `compare` of a mini-batch of the public images a step; 0 while the server has no answer to align to.

    `compare` gets representations [n, d] with gradients, and their rows of a factor of K-bar (True), or their rows and
    columns of K-bar (False). Representations are whitened by the matrix of the client's last ones that
    `representation_mean` computed, if its kernels are. BatchNorm takes the statistics of the batch, and the running
    ones stay as they are.
    """
    client, model, public, sent = local.client, local.client.model, local.client.public_images, local.received.tensors
    assert public is not None
    layer: Any = local.received.config["alignment.layer"]
    factored = FACTOR in sent
    if (target := sent.get(FACTOR, sent.get(KERNEL))) is None:
        return lambda step: step.loss.new_zeros(())
    whitening = client.memory.tensors.get(WHITENING)
    if whitening is not None:
        whitening = whitening.to(model.device)
    batches = endless_batches(len(public), batch_size, local.generator(purpose))

    def term(step: Step) -> Tensor:
        rows = next(batches)
        images = public[rows].to(model.device, non_blocking=True)
        with untouched_running_statistics(model):
            x = model.represent(normalize(images), layer)
        part = target[rows] if factored else target[rows][:, rows]
        return compare(x if whitening is None else x @ whitening, part.to(x, non_blocking=True), factored)

    return term


class CKAAlignment(Regularizer):
    """mu * (1 - CKA(K_k, K-bar)) on a mini-batch of the public images a step (Makhija et al. 2022, Eq. 1 and 2).

    The paper prints + mu * CKA, which drives clients apart when it is minimised. CKA is a similarity and the text calls
    the term a distance, so it is 1 - CKA here. A step's representations are compared with the same rows of the factor
    of K-bar, or the same rows and columns of K-bar. The aggregator `representation_mean` determines what K-bar is
    (peers or a control, which layer, which kernel), and its message carries these options here. Logs `cka`, the mean
    over the round's steps. A high CKA alone is not a success: a representation of rank one aligns perfectly, so read
    the effective rank beside it.

    Deviation in the batch: the paper prints the CKA of all public images, 5,000 in its experiments, and Algorithm 1
    computes their kernel once an epoch. Here a step takes `batch_size` of them, 100 by default. All 5,000 are 25 times
    as many as the 200 images of the paper's batches; `batch_size: 5000` takes them.

    The paper does not tell in which mode the network runs on the public images. Here BatchNorm takes the statistics of
    the batch and leaves the running ones alone, which then tell of the client's own images only. As K-bar is computed
    with running statistics, a client's CKA with its own kernel is below 1 even with unchanged weights.
    docs/methods/hetero_ssfl.md tells what other choices reached.
    """

    needs_public_images = True
    needs_aggregator = "representation_mean"

    weight: float = Field(0.5, ge=0, description="mu, the term's factor; the paper has 0.5 (CIFAR), 1 (Tiny-ImageNet)")
    batch_size: int = Field(100, ge=2, description="public images a step")

    def start_round(self, local: LocalRound) -> StepLoss:
        centered = bool(local.received.config["alignment.centered"])

        def compare(x: Tensor, target: Tensor, factored: bool) -> Tensor:
            cka = (linear_cka if factored else linear_cka_to_kernel)(x, target, centered=centered)
            local.log("cka", cka.detach())
            return self.weight * (1.0 - cka)

        return term_of_public_images(local, self.batch_size, "cka_alignment", compare)
