"""Where do networks part? fedkernels.linear_cka_pairwise between all layers of networks on the same images.

    python examples/compare_networks.py

After Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited".
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedkernels import linear_cka_pairwise


def train(width: int, seed: int, images: Tensor, labels: Tensor) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs in (64, width, width, width):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, int(labels.max()) + 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    return network


@torch.no_grad()
def activations(network: nn.Sequential, images: Tensor) -> list[Tensor]:
    """The output of every ReLU and of the last layer, [L, width] each."""
    found, x = [], images
    for layer in network:
        x = layer(x)
        if isinstance(layer, nn.ReLU):
            found.append(x)
    return [*found, x]


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    known, new = slice(0, 1200), slice(1200, None)

    reads_digits = train(64, 1, images[known], labels[known])
    same_task = train(96, 2, images[known], labels[known])  # another seed, and another width: CKA does not mind
    other_task = train(96, 2, images[known], labels[known] % 2)  # odd or even?
    first = activations(reads_digits, images[new])
    names = ["layer 1", "layer 2", "layer 3", "layer 4", "logits"]
    for title, network in (("the same task", same_task), ("another task", other_task)):
        similarity = linear_cka_pairwise(first, activations(network, images[new]), centered=True)
        print(f"CKA with the layers (across) of a network trained on {title}")
        print(" " * 8 + "".join(f"{name:>9}" for name in names))
        for name, row in zip(names, similarity.tolist(), strict=True):
            print(f"{name:>8}" + "".join(f"{value:9.2f}" for value in row))
        print("layer by layer: " + ", ".join(f"{value:.2f}" for value in similarity.diagonal().tolist()) + "\n")


if __name__ == "__main__":
    main()
