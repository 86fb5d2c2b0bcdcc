"""MoCo on synthetic signals: fedkernels.info_nce with keys from a momentum encoder and a queue, which get no gradient.

python examples/moco.py
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels import info_nce

CLASSES, LENGTH = 8, 64
SHAPES = (torch.sin, lambda t: torch.sin(t).sign(), lambda t: torch.sin(t).abs(), lambda t: (t / torch.pi) % 2 - 1)


def view(classes: Tensor) -> Tensor:
    """One recording of each signal: four shapes at two frequencies, of random phase and strength, with noise."""
    phase, strength = 6.28 * torch.rand(len(classes), 1), torch.empty(len(classes), 1).uniform_(0.5, 2)
    time = (2 + classes[:, None] % 2) * torch.linspace(0, 6.28, LENGTH) + phase
    waves = torch.stack([shape(time) for shape in SHAPES])[classes // 2, torch.arange(len(classes))]
    return strength * (waves + 0.3 * torch.randn_like(waves))


@torch.no_grad()
def accuracy(encoder: nn.Module) -> float:
    """Of the nearest neighbour among five labelled recordings of each class."""
    few, many = torch.arange(CLASSES).repeat(5), torch.randint(0, CLASSES, (1000,))
    known, new = (F.normalize(encoder(view(classes)), dim=1) for classes in (few, many))
    return float((few[(new @ known.T).argmax(1)] == many).float().mean())


def main() -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(LENGTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
    momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    queue = F.normalize(torch.randn(1024, 32), dim=1)  # keys of earlier steps, further negatives
    before = accuracy(encoder)

    for step in range(400):
        signals = torch.randint(0, CLASSES, (128,))
        query = F.normalize(encoder(view(signals)), dim=1)
        with torch.no_grad():
            key = F.normalize(momentum_encoder(view(signals)), dim=1)
        loss = info_nce(query, torch.cat([key, queue]), temperature=0.2)  # the positive of query i is key i
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([key, queue])[: len(queue)]
        with torch.no_grad():
            for slow, fast in zip(momentum_encoder.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.2f}")

    print(f"accuracy by the nearest of 5 labelled signals a class: {before:.1%} before, {accuracy(encoder):.1%} after")


if __name__ == "__main__":
    main()
