"""A federated round in which every client gains: fedkernels.delta_gram, client_weights and apply_deltas.

    python examples/weigh_clients.py

Five clients hold the digits 0 to 4 and one holds 5 to 9. The mean of their updates serves the five. Along the convex
combination of least norm (FedU2, Liao et al. 2024, Eq. 10) every client improves.
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedkernels import apply_deltas, client_weights, delta_gram

ROUNDS = 10


def train(model: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def even(gram: Tensor) -> Tensor:
    return torch.full_like(gram[0], 1 / len(gram))


def least_norm(gram: Tensor) -> Tensor:
    """Of the updates scaled to one length, so that a client does not count for how far it went."""
    length = gram.diagonal().sqrt()
    weights = client_weights(gram / (length[:, None] * length)) / length
    return weights / weights.sum()


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    low, high = (labels < 5).nonzero()[:, 0], (labels >= 5).nonzero()[:, 0]
    clients = [*low[:750].split(150), high[:150]]
    held_out = [low[750:], high[150:]]

    for name, choose in (("even weights", even), ("weights of least norm", least_norm)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        for _ in range(ROUNDS):
            trained = [list(train(model, images[own], labels[own]).parameters()) for own in clients]
            weights = choose(delta_gram(list(model.parameters()), trained))
            apply_deltas(list(model.parameters()), trained, weights)
        with torch.no_grad():
            right = [float((model(images[own]).argmax(1) == labels[own]).float().mean()) for own in held_out]
        print(f"{name}: last round {', '.join(f'{weight:.2f}' for weight in weights.tolist())}")
        print(f"    accuracy after {ROUNDS} rounds: {right[0]:.1%} on the digits 0 to 4, {right[1]:.1%} on 5 to 9")


if __name__ == "__main__":
    main()
