"""The mean of the clients' kernels on the public images: what Hetero-SSFL's clients align to."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..data.augmentation import normalize
from ..errors import UserError
from ..evaluation.spectrum import effective_rank
from ..messages import Message
from ..models.model import Layer
from .base import Aggregator, Shape

FACTOR = "alignment.factor"
KERNEL = "alignment.kernel"
WHITENING = "alignment.whitening"

# eigenvalues below this fraction of the largest count as zero; float32 representations carry no more
RELATIVE_RANK_TOLERANCE = 1e-6


def whitening_matrix(representation: Tensor) -> Tensor:
    """(A'A)^(-1/4) as a pseudo-inverse, [d, d] from A [L, d].

    A W has the kernel A (A'A)^(-1/2) A' = (A A')^(1/2): each direction counts by its singular value and not by
    its square, so that the few large directions of a representation do not drown the others.
    """
    a = representation.to(torch.float64)
    values, vectors = torch.linalg.eigh(a.T @ a)
    keep = values > RELATIVE_RANK_TOLERANCE * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    scale = torch.where(keep, values.clamp_min(torch.finfo(torch.float64).tiny).pow(-0.25), 0.0)
    return ((vectors * scale) @ vectors.T).to(representation.dtype)


def join_factors(factors: list[Tensor], weights: list[float]) -> Tensor:
    """F [L, sum d_j] with F F' = sum_j w_j A_j A_j', from A_j [L, d_j]."""
    return torch.cat([factor * weight**0.5 for factor, weight in zip(factors, weights, strict=True)], dim=1)


class RepresentationMean(Aggregator):
    """Hetero-SSFL, Algorithm 1: K-bar = sum_j w_j K_j with K_j = A_j A_j', A_j [L, d_j] client j's representations.

    Clients send A_j, never their weights or images. The server keeps the last A_j of every client, so K-bar is the
    sum over all clients as printed, also where only some take part in a round. Where sum_j d_j < L it sends the
    factor F = [sqrt(w_j) A_j] of K-bar = F F' and not the L x L matrix: the same numbers in fewer bytes.

    A_j is taken at the end of client j's round (Algorithm 1 takes it at the start of the next one: the same weights)
    in evaluation mode, from the public images without augmentation. Its effective rank is logged in every round, to be
    read beside `cka`.

    Options:
        target: `peers` is the paper's K-bar. `self` (the client's own kernel of its previous round) and
            `untrained` (K-bar of the untrained networks, never renewed) are controls: what they reach was not
            learned from the peers.
        layer: `predictor` is the paper's choice; `encoder` is what gets evaluated.
        centered: align the column-centred representations (Kornblith et al. 2019); the paper's Eq. 1 does not.
        kernel: `linear` is the paper's; `frobenius` divides each K_j by its norm, so that a client with large
            representations does not outvote the others; `half_whitened` takes (A_j A_j')^(1/2), see
            `whitening_matrix`.
        weights: w_j by client; uniform where not given (section 5.1).
        send: `auto`, or always the `factor` or the `kernel`.
    """

    opening_round: ClassVar[bool] = True
    needs_public_images: ClassVar[bool] = True

    target: Literal["peers", "self", "untrained"] = "peers"
    layer: Layer = "predictor"
    centered: bool = False
    kernel: Literal["linear", "frobenius", "half_whitened"] = "linear"
    weights: list[float] | None = None
    send: Literal["auto", "factor", "kernel"] = "auto"
    batch_size: int = Field(500, ge=1, description="public images a forward pass; does not change the result")

    def check(self, clients: int) -> None:
        if self.weights is None:
            return
        if len(self.weights) != clients:
            raise UserError(f"representation_mean.weights has {len(self.weights)} entries for {clients} clients")
        if min(self.weights) < 0 or sum(self.weights) <= 0:
            raise UserError("representation_mean.weights must be non-negative with a positive sum")

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        if self.target == "self":
            own = {k: server.tensors.get(f"representation.{k}") for k in clients}
            return {k: self._message([], []) if a is None else self._message([a], [1.0]) for k, a in own.items()}
        known = sorted(int(name.split(".")[1]) for name in server.tensors if name.startswith("representation."))
        weights = [1.0 if self.weights is None else self.weights[k] for k in known]
        total = sum(weights) or 1.0
        factors = [server.tensors[f"representation.{k}"] for k in known]
        return dict.fromkeys(clients, self._message(factors, [w / total for w in weights]))

    def _message(self, factors: list[Tensor], weights: list[float]) -> Message:
        config: dict[str, str | int | float | bool] = {
            "alignment.layer": self.layer,
            "alignment.centered": self.centered,
        }
        if not any(weights):  # no usable answer yet: nothing to align to
            return Message(config=config)
        factor = join_factors(factors, weights)
        rows, columns = factor.shape
        as_factor = self.send == "factor" or (self.send == "auto" and columns < rows)
        tensors = {FACTOR: factor} if as_factor else {KERNEL: factor @ factor.T}
        return Message(tensors, config=config)

    @torch.no_grad()
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        client = local.client
        assert client.public_images is not None
        model = client.model
        model.eval()
        batches = client.public_images.split(self.batch_size)
        a = torch.cat([model.represent(normalize(b.to(model.device)), self.layer) for b in batches]).cpu()
        local.log("public_effective_rank", effective_rank(a))
        if self.centered:
            a = a - a.mean(dim=0)
        if self.kernel == "frobenius":
            a = a / (a.to(torch.float64).T @ a.to(torch.float64)).norm().sqrt().clamp_min(1e-30).to(a.dtype)
        elif self.kernel == "half_whitened":
            whitening = whitening_matrix(a)
            # the alignment term of the next round measures its mini-batches by the same matrix
            client.memory.tensors[WHITENING] = whitening
            a = a @ whitening
        return Message({f"representation.{client.index}": a})

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        known = (len(a) for name, a in server.tensors.items() if name.startswith("representation."))
        return {f"representation.{client}": (next(known, "public images"), None)}

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        if self.target == "untrained" and any(name.startswith("representation.") for name in server.tensors):
            return Message()
        return Message({name: replies[k].tensors[name] for k in sorted(replies) for name in [f"representation.{k}"]})
