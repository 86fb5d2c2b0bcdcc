"""Register two point clouds that share only a part: fedkernels.unbalanced_ot as the distance, its plan as the matches.

    python examples/transport.py

Balanced transport has to move every point. Here a point for which no partner is worth the way stays unmatched.
"""

import math

import torch
from torch import Tensor

from fedkernels import unbalanced_ot, unbalanced_ot_plan

SHARED, ALONE = 80, 20
PRICE = {"a": 1.0, "b": 1.0, "tau_a": 0.05, "tau_b": 0.05}  # squared distances above 2 x 0.05 are not worth a match


def rotated(points: Tensor, angle: Tensor, shift: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return points @ torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])]).T + shift


def main() -> None:
    torch.manual_seed(0)
    shape = torch.rand(SHARED, 2) * torch.tensor([2.0, 1.0])
    # The same shape seen twice, with noise, from elsewhere, and each time with points that the other view lacks.
    true_angle, true_shift = torch.tensor(math.radians(20)), torch.tensor([0.3, -0.2])
    source = torch.cat([shape, torch.rand(ALONE, 2) + torch.tensor([2.5, 0.0])])
    target = torch.cat([rotated(shape, true_angle, true_shift), torch.rand(ALONE, 2) - torch.tensor([1.5, 0.5])])
    target = target + 0.005 * torch.randn_like(target)

    angle, shift = torch.zeros((), requires_grad=True), torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([angle, shift], lr=0.02)
    print(f"angle 0.0 of 20 degrees, shift off by {float(true_shift.norm()):.3f}")
    for step in range(1, 121):
        cost = torch.cdist(rotated(source, angle, shift), target).square()
        value = unbalanced_ot(cost, **PRICE)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 40 == 0:
            off = float((shift - true_shift).norm().detach())
            turned = math.degrees(angle.item())
            print(f"step {step:3}: cost {value.item():.2f}, angle {turned:.1f}, shift off by {off:.3f}")

    with torch.no_grad():
        cost = torch.cdist(rotated(source, angle, shift), target).square()
    plan, info = unbalanced_ot_plan(cost, **PRICE, tol=1e-6)
    right = (plan[:SHARED].argmax(1) == torch.arange(SHARED)).float().mean()
    print(f"{float(right):.0%} of the {SHARED} shared points are matched to themselves")
    moved = [float(part.sum()) for part in plan.split([SHARED, ALONE])]
    print(f"mass moved from the {SHARED} shared points {moved[0]:.1f}, from the {ALONE} others {moved[1]:.1f}")
    print(f"solved to a duality gap of {float(info.gap):.0e} in {int(info.iterations)} iterations")


if __name__ == "__main__":
    main()
