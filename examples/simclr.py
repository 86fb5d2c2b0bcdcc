"""SimCLR on 8 x 8 digits: fedkernels.nt_xent in a training loop of one's own.

python examples/simclr.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedkernels import nt_xent


def views(images: Tensor) -> tuple[Tensor, Tensor]:
    """Two random views of each image: moved by up to one pixel, scaled in brightness, noisy, one square blanked out."""
    made = []
    for _ in range(2):
        rows, columns = (torch.randint(0, 3, (len(images), 1)) + torch.arange(8) for _ in range(2))
        padded = F.pad(images, (1, 1, 1, 1))
        view = padded[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
        row, column = torch.randint(0, 6, (2, len(images), 1)) - torch.arange(8)
        blank = ((row <= 0) & (row > -3))[:, :, None] & ((column <= 0) & (column > -3))[:, None, :]
        view = view.masked_fill(blank, 0) * torch.empty(len(images), 1, 1).uniform_(0.7, 1.3)
        made.append((view + 0.1 * torch.randn_like(view))[:, None])
    return made[0], made[1]


@torch.no_grad()
def accuracy(encoder: nn.Module, images: Tensor, labels: Tensor, labelled: int = 5) -> float:
    """Of the nearest class mean, learned from `labelled` images of each class."""
    features = F.normalize(encoder(images), dim=1)
    few = torch.cat([(labels == digit).nonzero()[:labelled, 0] for digit in range(10)])
    means = torch.stack([features[few][labels[few] == digit].mean(0) for digit in range(10)])
    rest = torch.ones(len(labels), dtype=torch.bool).index_fill(0, few, False)
    return float(((features[rest] @ F.normalize(means, dim=1).T).argmax(1) == labels[rest]).float().mean())


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)

    encoder = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten()),
    )
    projector = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64))
    before = accuracy(encoder.eval(), images, labels)

    encoder.train()
    optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=4e-3)
    for epoch in range(12):
        for batch in torch.randperm(len(images))[:1792].split(256):
            one, two = (F.normalize(projector(encoder(view)), dim=1) for view in views(images[batch]))
            loss = nt_xent(one, two, temperature=0.2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 4 == 3:
            print(f"epoch {epoch + 1}: loss {loss.item():.2f}")

    after = accuracy(encoder.eval(), images, labels)
    print(f"accuracy from 5 labels a class: {before:.1%} before, {after:.1%} after training without labels")


if __name__ == "__main__":
    main()
