"""FedU2's efficient unified aggregator: a step that changes the deviation from every client at the same rate."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedkernels import apply_deltas, client_weights, delta_gram

from ..messages import Message
from .weighted_mean import WeightedMean, distance_metric, is_statistic, means_by_samples, model_entries

#: what an update is divided by: its squared length (FedU2's paper, times 2) or its length (the released code)
UpdateDivisor = Literal["squared_length", "length"]

# A client whose update is shorter than this fraction of the longest one has not moved: it is float32's rounding.
RELATIVE_DEVIATION_TOLERANCE = 1e-6


def moved_clients(gram: Tensor) -> Tensor:
    """Return which clients have left the global model, bool [K], from <delta_i, delta_j>, float64 [K, K]."""
    deviation = gram.diagonal()
    return deviation > RELATIVE_DEVIATION_TOLERANCE**2 * deviation.max()


def least_norm_step(
    gram: Tensor, divide_by: UpdateDivisor, samples: list[float], length: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return p on the simplex with the least |sum_k p_k g_k|, and the shares w of theta_g - sum_k w_k delta_k.

    Both are float64 [K], with 0 for clients that did not move. Where none moved, both are proportional to `samples`.

    Args:
        gram: <delta_i, delta_j>, float64 [K, K].
        divide_by: g_k is 2 delta_k / |delta_k|^2 for `squared_length`, and delta_k / |delta_k| for `length`.
        length: the step is length * sum_k p_k g_k. By default the new model is a convex combination of the clients'
            models for `squared_length`, and `length` is the mean of |delta_k| by samples for `length`.
    """
    moved = moved_clients(gram)
    weights = torch.tensor(samples, dtype=torch.float64)
    if not moved.any():
        p = weights / weights.sum()
        return p, p
    squares = gram.diagonal()[moved]
    scale = 2 / squares if divide_by == "squared_length" else squares.rsqrt()
    p, shares = gram.new_zeros(2, len(gram))
    p[moved] = client_weights(gram[moved][:, moved] * scale[:, None] * scale)
    shares[moved] = p[moved] * scale
    if length is None and divide_by == "squared_length":
        return p, shares / shares.sum()
    if length is None:
        length = float((weights[moved] * squares.sqrt()).sum() / weights[moved].sum())
    return p, length * shares


def deviation_change_rates(gram: Tensor, step: Tensor) -> Tensor:
    """Compute Eq. 7 without its approximation, (u_k(old) - u_k(new)) / u_k(old), after sum_k step_k delta_k.

    u_k = |theta_g - theta_k|^2. `gram` is <delta_i, delta_j> [K, K], `step` is [K], and the result is float64, one rate
    for each client that moved.
    """
    product = gram @ step
    moved = moved_clients(gram)
    return (2 * product - step @ product)[moved] / gram.diagonal()[moved]


class EUA(WeightedMean):
    """FedU2 (Liao et al. 2024), section 3.4: theta_g <- theta_g - eta d*, d* = (eta / phi) sum_k p_k grad log u_k.

    u_k = |theta_g - theta_k|^2 is client k's deviation, so with delta_k = theta_g - theta_k its gradient is
    grad log u_k = 2 delta_k / |delta_k|^2. The weights p minimise p'Gp on the simplex with G_ij = <grad log u_i,
    grad log u_j> (Eq. 10). Along d* all clients with p_k > 0 change their deviation at the same rate. No direction of
    that length has a better rate for the worst of them. Clients with p_k = 0 have the same or a better rate (Theorem 1;
    exact in the limit of short steps).

    The paper gives no value for eta (Eq. 9 and the update below Eq. 12, one number as in Algorithm 1). Without
    `step_size` the new model is a convex combination of the clients' models, sum_k w_k theta_k with w_k proportional to
    p_k / |delta_k|^2. Where the updates are orthogonal, that is the unweighted mean, whatever their lengths. The
    paper's phi = 0.1, the multiplier of |d|^2 < 1 in Eq. 9, is constant, so it only divides the step.

    Who moves farthest has the shortest grad log u_k, and the least |sum_k p_k grad log u_k| lies with the shortest, so
    a client that moved less than others in nearly the same direction gets weight 0: five of ten in the first round of
    benchmarks/results/fedu2_cifar10_small, which tabulates the shares. Equal steps (`training.local_steps`) or equal
    sizes (`partition.name=dirichlet_equal`) help while the lengths are almost equal (within 2 % in round 1, 20 % in
    round 2), and unit updates after that too.

    With `divide_updates_by: length` g_k is delta_k / |delta_k|: each client counts by its direction alone. The released
    code of FedU2 does this under the name EUA, with nearly equal steps for all clients: MGDA (Désidéri 2012) over the
    clients, as in FedMGDA+ (Hu et al. 2022). It takes an SGD step for 2 g_k at a fixed rate, whatever the updates'
    lengths. Its default rate, 0.1, is `step_size` and `phi` of 0.2 each here; the 8 of its main.py is 16 each. Such a
    rate fits one model, one optimiser and one number of steps. Without `step_size` every update is brought to the mean
    of |delta_k|, weighted by samples, before p combines them. If all clients move in one direction, this step is
    FedAvg's. It is shorter by as much as the combined directions cancel, and 0 where no step improves all clients (same
    page). The code's solver starts at the weights by samples and stops after 20 iterations.

    Deviations from the paper: Eq. 12 clips its linear solve and does not reach the optimum of Eq. 10. Here p is solved
    exactly (`fedkernels.client_weights`), so there is no penalty rho = 1. Integers and running statistics have no
    meaningful deviation and are averaged by samples. A client that did not move (see RELATIVE_DEVIATION_TOLERANCE) has
    no grad log u_k and gets weight 0. Where none moved, the model stays as it is. Logs by client `eua_weight`, p_k, and
    `eua_share`, the w_k of theta_g - sum_k w_k delta_k: only the shares tell how much of the new model is a client's.
    With unit updates their sum is not 1.
    Also logs the smallest and the largest c_k of Eq. 7 after the step, over the clients that moved: `eua_rate_min` and
    `eua_rate_max`, negative where the global model moved away from a client.
    """

    divide_updates_by: UpdateDivisor = Field(
        "squared_length",
        description="scale of the updates: squared_length is the paper's 2 delta / |delta|^2, length the released "
        "code's delta / |delta|",
    )
    step_size: float | None = Field(
        None,
        gt=0,
        description="eta (default: the new model is a convex combination of the clients' models; with "
        "divide_updates_by length the updates' mean length by samples)",
    )
    phi: float = Field(0.1, gt=0, description="divides the step; used only with step_size")

    def aggregate(self, server: Message, replies: dict[int, Message]) -> Message:
        order, names = sorted(replies), model_entries(server, replies)
        samples = [replies[k].numbers["samples"] for k in order]
        statistics = [name for name in names if is_statistic(name, server.tensors[name])]
        weights = [name for name in names if name not in statistics]
        old = [server.tensors[name] for name in weights]
        clients = [[replies[k].tensors[name] for name in weights] for k in order]
        gram = delta_gram(old, clients).cpu()
        length = None if self.step_size is None else self.step_size**2 / self.phi
        p, step = least_norm_step(gram, self.divide_updates_by, samples, length)
        new = [tensor.clone() for tensor in old]
        apply_deltas(new, clients, step)

        state = Message(dict(zip(weights, new, strict=True)) | means_by_samples(replies, statistics))
        state.metrics = {f"eua_weight/{k}": float(weight) for k, weight in zip(order, p, strict=True)}
        state.metrics |= {f"eua_share/{k}": float(share) for k, share in zip(order, step, strict=True)}
        state.metrics |= distance_metric(gram)
        if len(rates := deviation_change_rates(gram, step)):
            state.metrics |= {"eua_rate_min/global": float(rates.min()), "eua_rate_max/global": float(rates.max())}
        return state
