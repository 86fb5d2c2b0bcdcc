"""The mean of the clients' kernels on the public images, to which Hetero-SSFL's clients align."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..data.pixels import normalize
from ..errors import UserError
from ..evaluation.features import images_at_a_time
from ..evaluation.metrics import effective_rank
from ..messages import Message
from ..models.model import Layer
from ..models.weights import frozen_encoder
from .base import PUBLIC_IMAGES, Aggregator, Capped, Shape

FACTOR = "alignment.factor"
KERNEL = "alignment.kernel"
ROUND = "alignment.round"
ASKED = "alignment.asked"
WHITENING = "alignment.whitening"
_LATEST = "representation."  # before a client's number: its last representations
_RELEASED = "released."  # the same, of those in the mean that is sent, with fewest_clients above 1

# Eigenvalues below this fraction of the largest one count as zero, as float32 representations are no more precise.
RELATIVE_RANK_TOLERANCE = 1e-6
# Columns of a factor whose diagonal is below this fraction of the largest are no more than rounding errors.
RELATIVE_FACTOR_TOLERANCE = 1e-7
_BATCH = 500  # public images a forward pass, at most
# No known encoder has as many features.
MOST_FEATURES = 2**13


def whitening_matrix(representation: Tensor, power: float = -0.25) -> Tensor:
    """Return (A'A)^power as a pseudo-inverse, [d, d] from A [L, d].

    With -1/4, A W has the kernel A (A'A)^(-1/2) A' = (A A')^(1/2). Each direction counts by its singular value and not
    by its square, so that a few large directions of a representation do not dominate the others. With -1/2 all count
    the same: the kernel is the projection onto the columns of A.
    """
    a = representation.to(torch.float64)
    values, vectors = torch.linalg.eigh(a.T @ a)
    keep = values > RELATIVE_RANK_TOLERANCE * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    scale = torch.where(keep, values.clamp_min(torch.finfo(torch.float64).tiny).pow(power), 0.0)
    return ((vectors * scale) @ vectors.T).to(representation.dtype)


def join_factors(factors: list[Tensor]) -> Tensor:
    """Return F [L, sum d_j] with F F' the mean of the A_j A_j', from A_j [L, d_j]."""
    return torch.cat([factor * (1 / len(factors)) ** 0.5 for factor in factors], dim=1)


def shared_directions(factors: list[Tensor], count: int) -> Tensor:
    """Return G [L, k], where G G' are the k largest terms of the mean of P_j = sum_i s_i u_i u_i', s_i descending.

    P_j is the projection onto the columns of A_j [L, d_j]. So u_1 is the direction that most representations contain,
    whatever its size in each: generalised canonical correlation analysis (Carroll 1968; MAXVAR in Kettenring 1971).
    k is `count`, or more where directions that are as shared as the last one come along, so that G G' follows from
    the mean of P_j alone: all of a single client's do. It is less where there are no more directions.
    """
    wide = [_narrow(factor.to(torch.float64)) for factor in factors]
    factor = _narrow(join_factors([a @ whitening_matrix(a, power=-0.5) for a in wide]))
    values, vectors = torch.linalg.eigh(factor.T @ factor)
    keep = values >= values[-min(count, len(values))] - RELATIVE_RANK_TOLERANCE * values[-1]
    return (factor @ vectors[:, keep]).to(factors[0].dtype)


def _kernel_norm(representation: Tensor) -> float:
    """Return the Frobenius norm of A A', from A [L, d]."""
    a = representation.to(torch.float64)
    return float((a.T @ a if a.shape[1] <= a.shape[0] else a @ a.T).norm())


def _narrow(factor: Tensor) -> Tensor:
    """Return G [L, min(L, D)] with G G' = F F' from F [L, D]: an eigendecomposition takes D^3 operations."""
    rows, columns = factor.shape
    return factor if columns <= rows else torch.linalg.qr(factor.T, mode="r").R.T


def canonical_factor(factor: Tensor) -> Tensor:
    """Return G [L, D] with G G' = F F' from F [L, D], such that G reveals nothing of F beyond F F'.

    F itself would: its blocks are the clients' own representations. QR with column pivoting gives F'P = Q R, and so
    G = P R' has G G' = F F'. R' is the Cholesky factor of P'(F F')P with a positive diagonal, which is unique, and each
    pivot is the largest diagonal entry of what is left of F F' after the pivots before. So everyone who has F F' can
    compute G from it (Golub and Van Loan 2013, sections 4.2.8 and 5.4.2). Columns behind the rank are zero: R holds
    rounding errors there, which would depend on F.
    """
    from scipy.linalg import qr

    triangle, order = qr(factor.T.to(torch.float64).numpy(), mode="r", pivoting=True)
    rows = torch.from_numpy(triangle)
    diagonal = rows.diagonal()
    rank = int((diagonal.abs() > RELATIVE_FACTOR_TOLERANCE * diagonal[0].abs()).sum())
    rows[:rank] *= diagonal[:rank].sign()[:, None]
    rows[rank:] = 0
    result = torch.empty_like(factor)
    result[torch.from_numpy(order).long()] = rows.T.to(factor.dtype)
    return result


class RepresentationMean(Aggregator):
    """Hetero-SSFL, Algorithm 1: K-bar = sum_j w_j K_j with K_j = A_j A_j', A_j [L, d_j] client j's representations.

    All w_j are the same, as in section 5.1.

    Clients send A_j, never their weights or images. The server keeps the last A_j of every client, so K-bar is the
    sum over all clients as printed, even if only some take part in a round. Where sum_j d_j < L it sends a factor of
    K-bar and not the L x L matrix, which takes fewer bytes: that of F = [sqrt(w_j) A_j] which `canonical_factor` gives,
    as F would hold each client's representations. K-bar itself tells what it tells: of two clients, each can subtract
    its own kernel and has the other's.

    A_j is computed at the end of client j's round, in evaluation mode, from the public images without augmentation.
    (Algorithm 1 computes it at the start of the next round, with the same weights.)

    The targets other than `peers` are controls, whose results were not learned from the peers: `self` is the client's
    own kernel of its previous round, and `untrained` is K-bar of the untrained networks, which never changes. `oracle`
    is the kernel of the encoder in `oracle`, which never changes either: where that was trained on all clients' images
    in one place, it says how much any peers could give (docs/methods/hetero_ssfl.md).

    With `renew_every` N, clients send their A_j in the opening round and in every Nth round only. Until the Nth round
    they align to the kernels of the untrained networks, and then N rounds long to those of then. The paper renews them
    in every round; docs/how_much_can_peers_give.md has what either reached.

    With `fewest_clients` n, K-bar is first sent when n clients have answered, and is then renewed only when n clients'
    kernels have changed. A client may add and subtract the K-bars that it was sent. The last one in such a sum has new
    kernels of at least n - 1 other clients, which no earlier one holds, so the sum is never one client's kernel. By
    default every round's answers are in the next K-bar. The kernel of a client that is alone to answer, or of one of
    two that answer the opening round, can then be computed from a difference.

    Kernel `half_whitened` is (A_j A_j')^(1/2), see `whitening_matrix`.

    With `views` n, the A_j that a client sends are the means over n random views of each public image, drawn by the
    recipe's augmentation, and not those of the images themselves. With `components` k, clients get the k directions
    that most of the A_j share in place of K-bar, see `shared_directions`. Neither is in the paper;
    docs/how_much_can_peers_give.md has what they bring.

    Logs `public_effective_rank`, the effective rank of A_j, to be read beside `cka`.
    """

    opening_round: ClassVar[bool] = True
    needs_public_images: ClassVar[bool] = True

    target: Literal["peers", "self", "untrained", "oracle"] = Field(
        "peers", description="whose kernels clients align to: all clients', a control's, or a given encoder's"
    )
    oracle: str | None = Field(
        None, description="the encoder of target oracle: a folder of fedssl export, or timm:NAME"
    )
    renew_every: int = Field(
        1, ge=1, description="rounds from one renewal of the kernels to the next; the paper renews them in each"
    )
    fewest_clients: int = Field(
        1,
        ge=1,
        description="the mean is renewed only when kernels of at least so many clients in it have changed; 3 or more "
        "keep a client from computing another's kernel",
    )
    layer: Layer = Field(
        "predictor", description="layer whose outputs are aligned; the paper has predictor, evaluation uses encoder"
    )
    centered: bool = Field(
        False, description="whether columns are centred (Kornblith et al. 2019), unlike in the paper's Eq. 1"
    )
    kernel: Literal["linear", "half_whitened"] = Field(
        "linear", description="how a kernel is made of representations; the paper has linear"
    )
    views: int = Field(
        0,
        ge=0,
        multiple_of=2,
        description="random views of a public image, over which the representations that are sent are means; 0: of the "
        "image itself, as in the paper",
    )
    components: int | None = Field(
        None,
        ge=1,
        description="how many shared directions are sent in place of the mean kernel (default: the mean kernel)",
    )

    def check(self, clients: int) -> None:
        if (self.target == "oracle") != (self.oracle is not None):
            raise UserError(
                f"representation_mean has target {self.target} and oracle {self.oracle}: target oracle, and no other, "
                "needs the folder of an exported encoder as oracle"
            )
        if self.fewest_clients > clients:
            raise UserError(
                f"representation_mean.fewest_clients is {self.fewest_clients}, but there are only {clients} clients: "
                "lower it, or no mean is ever sent"
            )

    def broadcast(self, server: Message, clients: list[int], travelling: list[str]) -> dict[int, Message]:
        sent = self._targets(server, clients)
        if not self._renews(server):
            for message in sent.values():
                message.config[ASKED] = False
        return sent

    def _targets(self, server: Message, clients: list[int]) -> dict[int, Message]:
        if self.target == "self":
            own = {k: server.tensors.get(f"representation.{k}") for k in clients}
            return {k: self._message([] if a is None else [a]) for k, a in own.items()}
        prefix = _LATEST if self.fewest_clients == 1 else _RELEASED
        answered = sorted(int(name.split(".")[1]) for name in server.tensors if name.startswith(prefix))
        return dict.fromkeys(clients, self._message([server.tensors[f"{prefix}{k}"] for k in answered]))

    def _message(self, factors: list[Tensor]) -> Message:
        tensors = {}
        config: dict[str, str | int | float | bool] = {
            "alignment.layer": self.layer,
            "alignment.centered": self.centered,
        }
        if factors:  # otherwise there is no answer to align to yet
            count = self.components
            factor = join_factors(factors) if count is None else shared_directions(factors, count)
            if factor.shape[1] < factor.shape[0]:
                tensors[FACTOR] = factor if self.target == "self" else canonical_factor(factor)
            else:
                tensors[KERNEL] = factor @ factor.T
        return Message(tensors, config=config)

    @torch.no_grad()
    def collect(self, local: LocalRound, travelling: list[str]) -> Message:
        client, model = local.client, local.client.model.eval()
        represent = partial(model.represent, layer=self.layer)
        a = self._represented(local, represent, views=0)
        local.log("public_effective_rank", effective_rank(a))
        factor, whitening = self._factor(a)
        if whitening is not None:  # the term of the next round whitens its mini-batches by the same matrix
            client.memory.tensors[WHITENING] = whitening
        if not local.received.config.get(ASKED, True):
            return Message()
        if self.oracle is not None:
            shape = client.images.shape[1:]
            oracle = frozen_encoder(self.oracle, shape, "representation_mean.oracle").to(model.device)
            factor, _ = self._factor(self._represented(local, oracle, self.views))
        elif self.views:
            factor, _ = self._factor(self._represented(local, represent, self.views))
        return Message({f"representation.{client.index}": factor})

    def _represented(self, local: LocalRound, represent: Callable[[Tensor], Tensor], views: int) -> Tensor:
        """Return the public images' representations [L, d] on the CPU, the means over so many views (0: no views)."""
        public, device = local.client.public_images, local.client.model.device
        assert public is not None
        means = []
        for batch in torch.arange(len(public)).split(images_at_a_time(public, _BATCH)):
            drawn = [local.views(public[batch], batch, "representation", pair) for pair in range(views // 2)]
            images = [view for pair in drawn for view in pair] or [normalize(public[batch].to(device))]
            means.append(torch.stack([represent(one) for one in images]).mean(dim=0).cpu())
        return torch.cat(means)

    def _factor(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the factor of the kernel that representations [L, d] make, and its whitening matrix if it has one."""
        if self.centered:
            a = a - a.mean(dim=0)
        if self.kernel == "half_whitened":
            whitening = whitening_matrix(a)
            return a @ whitening, whitening
        return a, None

    def expected(self, server: Message, client: int, travelling: list[str]) -> dict[str, Shape] | None:
        shape: Shape = (PUBLIC_IMAGES, range(1, MOST_FEATURES + 1))
        return {f"representation.{client}": shape} if self._renews(server) else {}

    def limited(self, replies: dict[int, Message], capped: Capped) -> tuple[dict[int, Message], dict[int, str]]:
        names = {k: f"representation.{k}" for k in replies}
        sizes = {k: _kernel_norm(replies[k].tensors[name]) for k, name in names.items() if name in replies[k].tensors}
        if len(sizes) < 3:  # two say nothing of each other
            return replies, {}
        lowered, reasons = dict(replies), {}
        for k, most in capped(sizes).items():
            scaled = replies[k].tensors[names[k]] * (most / sizes[k]) ** 0.5
            lowered[k] = replace(replies[k], tensors=replies[k].tensors | {names[k]: scaled})
            part = f"{100 * sizes[k] / sum(sizes.values()):.4g} % of the sum of the clients' kernels"
            reasons[k] = f"its kernel is {part}, more than guard.largest_influence allows: it is made smaller"
        return lowered, reasons

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        numbers = {ROUND: server.numbers.get(ROUND, -1.0) + 1} if self.renew_every > 1 else {}
        if not self._renews(server):
            return Message(numbers=numbers)
        tensors = {f"representation.{k}": replies[k].tensors[f"representation.{k}"] for k in sorted(replies)}
        return Message(tensors | self._released(server.tensors | tensors), numbers=numbers)

    def _released(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of the next mean that is sent; none where it stays as it is, see `fewest_clients`."""
        if self.fewest_clients == 1:
            return {}
        latest = {int(name.removeprefix(_LATEST)): a for name, a in tensors.items() if name.startswith(_LATEST)}
        before = {k: tensors.get(f"{_RELEASED}{k}") for k in latest}
        changed = [k for k, a in before.items() if a is None or not torch.equal(a, latest[k])]
        return {f"{_RELEASED}{k}": a for k, a in latest.items()} if len(changed) >= self.fewest_clients else {}

    def disclosure(self, clients: int) -> str | None:
        if self.target in ("self", "oracle"):
            return None
        if self.fewest_clients > 2:
            told = (
                f"It is renewed only when {self.fewest_clients} clients' kernels have changed (fewest_clients), so no "
                "combination of the means that a client is sent is one other client's kernel: each holds those of at "
                f"least {self.fewest_clients - 1} others. Clients that work together know their own, and kernels "
                "change little from round to round, so what is near to a kernel can still be estimated"
            )
        else:
            remedy = "with two clients nothing hides it" if clients == 2 else "set fewest_clients to 3 or more"
            told = (
                f"With {clients} clients and fewest_clients {self.fewest_clients} a client can compute another's "
                "kernel exactly: of two that have answered, each subtracts its own, and where clients are missing or "
                f"sampled the difference of two rounds' means is the kernel of who has newly answered: {remedy}"
            )
        mean = "the mean of the clients' kernels, which tell all of the representations but a rotation"
        if self.components is not None:
            mean = f"{self.components} directions that the representations share, cut from a mean of such kernels"
        return (
            "representation_mean: the server has each client's representations of the public images. Every client gets "
            f"{mean}. {told}."
        )

    def _renews(self, server: Message) -> bool:
        """Return whether clients send their representations in the round after the server's state."""
        if self.target in ("untrained", "oracle"):
            return not any(name.startswith(_LATEST) for name in server.tensors)
        return (server.numbers.get(ROUND, -1.0) + 1) % self.renew_every == 0
