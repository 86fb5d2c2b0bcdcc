"""min p'Gp over the simplex (FedU2, Eq. 10) by ADMM with p split from its non-negative copy z, in float64.

    p <- argmin_{1'p = 1} p'Gp + rho/2 |p - z + w|^2      an equality: one symmetric solve
    z <- max(0, p + w)
    w <- w + p - z

FedU2's Eq. 12 clips the p-update itself instead of a copy. That is not the non-negative optimum, and for rho of order
1 it does not converge. Which clients have weight 0 is known long before the weights are, so that an exact solve on the
other clients ends the iterations.
"""

import warnings

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype

_MAX_ITERATIONS = 20_000
_MAX_STALLED = 5  # exact solves in a row, 100 iterations apart, without progress: the residual is rounding


@torch.no_grad()
def client_weights(gram: Tensor, *, tol: float = 1e-8) -> Tensor:
    """gram [..., K, K] symmetric positive semi-definite -> weights [..., K]."""
    clients = gram.shape[-1]
    problems = gram.double().cpu().reshape(-1, clients, clients)
    weights = [_solve(problem / 2 + problem.T / 2, tol) for problem in problems]
    if not weights:
        return gram.new_empty(gram.shape[:-1], dtype=compute_dtype(gram))
    return torch.stack(weights).reshape(gram.shape[:-1]).to(gram.device, compute_dtype(gram))


def residual(gram: Tensor, p: Tensor) -> Tensor:
    """p'Gp - min_k (Gp)_k: 0 exactly at the optimum, and no less than its excess over the optimum."""
    gradient = gram @ p
    return p @ gradient - gradient.min()


def _solve(gram: Tensor, tol: float) -> Tensor:
    clients = gram.shape[0]
    uniform = gram.new_full((clients,), 1 / clients)
    if clients == 1 or gram.trace() <= 0:
        return uniform
    if gram.trace().isinf():
        gram = gram / gram.abs().max()
    gram = gram / gram.trace()
    # Two upper bounds of the optimum: the value at equal weights and that of the best single client.
    scale = torch.minimum(uniform @ gram @ uniform, gram.diagonal().min())
    epsilon = clients * torch.finfo(gram.dtype).eps
    accept = (tol * scale).clamp(min=epsilon)  # below that, the residual itself is rounding

    eigenvalues, vectors = torch.linalg.eigh(gram)
    if eigenvalues[0] < -epsilon:
        # Rounding to the dtype of the input made it indefinite, without a minimum. Take the nearest matrix with one.
        gram = (vectors * eigenvalues.clamp(min=0)) @ vectors.T
        gram = (gram + gram.T) / 2
    eigenvalues = eigenvalues.clamp(min=0)
    ones = vectors.sum(0)  # the vector 1 in the basis of eigenvectors
    rho = 2 / clients  # the mean eigenvalue of 2G
    z, w = uniform, torch.zeros_like(uniform)
    best, stalled = uniform, 0
    for iteration in range(1, _MAX_ITERATIONS + 1):
        inverse = 1 / (2 * eigenvalues + rho)
        target = rho * (vectors.T @ (z - w))
        multiplier = ((inverse * ones * target).sum() - 1) / (inverse * ones * ones).sum()
        p = vectors @ (inverse * (target - multiplier * ones))
        previous, z = z, (p + w).clamp(min=0)
        w = w + p - z
        if iteration % 10:
            continue
        weights = z / z.sum()
        if iteration % 100 == 0:
            weights = _polish(gram, weights)
            stalled = 0 if residual(gram, weights) < residual(gram, best) / 2 else stalled + 1
        if residual(gram, weights) < residual(gram, best):
            best = weights
        if residual(gram, best) <= accept or stalled == _MAX_STALLED:
            break
        # Residual balancing (Boyd et al. 2011, section 3.4.1).
        primal, dual = (p - z).norm(), rho * (z - previous).norm()
        if primal > 10 * dual:
            rho, w = rho * 2, w / 2
        elif dual > 10 * primal:
            rho, w = rho / 2, w * 2
    best = _polish(gram, best)
    if (reached := float(residual(gram, best))) > accept:
        warnings.warn(
            f"client_weights: p'Gp - min_k (Gp)_k is {reached:.1e} of the trace of gram and does not decrease further, "
            f"but tol = {tol:g} asks for {float(accept):.1e}; raise tol, or compute gram in float64",
            stacklevel=2,
        )
    return best


def _polish(gram: Tensor, p: Tensor) -> Tensor:
    """Improves p by a primal active-set method.

    It goes to the minimum on the face of the simplex that p lies in, adds the coordinate with the least gradient to the
    face, and stops when no coordinate improves the value. The result is never worse than p, and exact up to rounding.
    """
    best = p
    face = p > 0
    for _ in range(3 * len(p)):
        while True:
            step = torch.where(face, _face_minimum(gram, face) - p, 0)
            blocking = p + step < 0
            if not blocking.any():
                p = p + step
                break
            # As far as the simplex reaches; the coordinate that hits 0 leaves the face.
            reach = torch.where(blocking, p / -step, torch.inf)
            hit = reach.argmin()
            p = (p + reach[hit] * step).clamp(min=0)
            p[hit], face[hit] = 0, False
        p = p / p.sum()
        if residual(gram, p) < residual(gram, best):
            best = p
        gradient = gram @ p
        entering = torch.where(face, torch.inf, gradient).argmin()
        if face.all() or gradient[entering] >= (1 - 1e-14) * (p @ gradient):
            break
        face[entering] = True
    return best


def _face_minimum(gram: Tensor, face: Tensor) -> Tensor:
    """argmin p'Gp with 1'p = 1 and p = 0 outside the face; of several, the one of least norm (duplicates share)."""
    inside = face.nonzero()[:, 0]
    size = len(inside)
    system = gram.new_ones(size + 1, size + 1)
    system[:size, :size] = gram[inside][:, inside] * len(gram)  # entries of order 1, as its border
    system[size, size] = 0
    right = torch.zeros_like(system[:, :1])
    right[size] = 1
    solution = torch.linalg.lstsq(system, right, driver="gelsd").solution[:size, 0]
    return torch.zeros_like(gram[0]).index_put((inside,), solution)
