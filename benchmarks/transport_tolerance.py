"""How far unbalanced_ot's gradient is off at each tolerance, on the problems of FedU2's regularizer.

    python -m benchmarks.transport_tolerance

It prints the table of docs/operators/unbalanced_ot.md, in about ten seconds. No time is measured.
"""

from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkernels import unbalanced_ot_plan

SIZES = [(32, 64), (64, 128), (128, 128), (128, 512), (256, 256)]  # B and d
TOLERANCES = [1e-3, 1e-4, 1e-5, 1e-6, 1e-7]
EXACT = 1e-12
SEEDS = range(10, 18)
TAU = 0.8


def representations(kind: str, rows: int, features: int, generator: torch.Generator) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "random":
        z = normal(rows, features)
    elif kind == "of rank 8":
        z = normal(rows, 8) @ normal(8, features)
    else:  # collapsed
        z = normal(1, features) + 0.3 * normal(rows, features)
    return F.normalize(z, dim=1)


def gradient_and_steps(z: Tensor, samples: Tensor, tol: float, method: str = "accelerated") -> tuple[Tensor, int]:
    """The gradient in z [B, d], along the sphere, and the number of steps."""
    plan, info = unbalanced_ot_plan(1 - z @ samples.T, 1.0, 1.0, TAU, TAU, tol=tol, method=method)
    gradient = -plan @ samples
    return gradient - (gradient * z).sum(1, keepdim=True) * z, int(info.iterations)


def main() -> None:
    print("| B, d |", *(f"{tol:.0e} |".replace("e-0", "e-") for tol in TOLERANCES))
    print("|---" * (1 + len(TOLERANCES)) + "|")
    for rows, features in SIZES:
        errors: dict[float, list[float]] = {tol: [] for tol in TOLERANCES}
        steps: dict[float, list[int]] = {tol: [] for tol in TOLERANCES}
        for kind in ("random", "of rank 8", "collapsed"):
            for seed in SEEDS:
                generator = torch.Generator().manual_seed(seed)
                z = representations(kind, rows, features, generator)
                samples = F.normalize(torch.randn(rows, features, generator=generator, dtype=torch.float64), dim=1)
                truth, _ = gradient_and_steps(z, samples, EXACT, "interior_point")
                for tol in TOLERANCES:
                    gradient, taken = gradient_and_steps(z, samples, tol)
                    errors[tol].append(float(100 * (gradient - truth).norm() / truth.norm()))
                    steps[tol].append(taken)
        print(f"| {rows}, {features} |", end="")
        for tol in TOLERANCES:
            print(f" {median(errors[tol]):.2g} %, {max(errors[tol]):.2g} %, {median(steps[tol]):.0f} |", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
