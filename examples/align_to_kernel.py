"""Teach a network from a kernel alone: fedkernels.linear_cka_to_kernel against the similarities that another one sees.

    python examples/align_to_kernel.py

The student gets no labels, no weights and no features of the teacher, only which of 600 images look alike to it: the
matrix K = f(x) f(x)' of its features. Widths and architectures may differ.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedkernels import linear_cka_to_kernel


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor, known: slice, new: slice) -> float:
    """Of the nearest neighbour in the network's output."""
    features = F.normalize(network(images), dim=1)
    nearest = (features[new] @ features[known].T).argmax(1)
    return float((labels[known][nearest] == labels[new]).float().mean())


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    public, known, new = slice(0, 600), slice(600, 650), slice(650, None)  # for the kernel, with labels, for the test

    teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(teacher(images[public]), labels[public]).backward()
        optimizer.step()
    with torch.no_grad():
        features = teacher(images[public]).softmax(1)
        kernel = features @ features.T  # [600, 600]: all that the student is given

    student = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    print(f"teacher: accuracy from 50 labels {accuracy(teacher, images, labels, known, new):.1%}")
    for step in range(151):
        chosen = torch.randperm(600)[:256]
        loss = 1 - linear_cka_to_kernel(student(images[chosen]), kernel[chosen][:, chosen], centered=True)
        if step % 50 == 0:
            found = accuracy(student, images, labels, known, new)
            print(f"student after {step:3} steps: CKA {1 - loss.item():.2f}, accuracy from 50 labels {found:.1%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
