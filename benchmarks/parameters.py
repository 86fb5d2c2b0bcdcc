"""Parameters of a global model and of its clients, as delta_gram and apply_deltas read them."""

from functools import partial

import torch

from benchmarks.case import Inputs

CLIENTS = 10


def model_shapes(quick: bool) -> list[torch.Size]:
    """The 62 parameters of a ResNet-18, 11.7 million numbers; a few small ones where `quick`."""
    if quick:
        return [torch.Size(shape) for shape in ((8, 3, 3, 3), (8,), (10, 8), (10,))]
    import torchvision  # here, for it takes seconds

    with torch.device("meta"):
        return [parameter.shape for parameter in torchvision.models.resnet18().parameters()]


def count(shapes: list[torch.Size]) -> int:
    """How many numbers a model of these shapes has."""
    return sum(map(torch.Size.numel, shapes))


def size_of(shapes: list[torch.Size], clients: int = CLIENTS) -> str:
    return f"K = {clients}, P = {count(shapes) / 1e6:.3g} M in {len(shapes)} tensors"


def parameters(shapes: list[torch.Size], clients: int, device: torch.device) -> Inputs:
    """float32: "global" and "clients", which differ from it by 1 % of its size, about half of that in common."""
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    start = [draw(shape) for shape in shapes]
    common = [0.007 * draw(shape) for shape in shapes]
    others = [[p + c + 0.007 * draw(p.shape) for p, c in zip(start, common, strict=True)] for _ in range(clients)]
    return {"global": start, "clients": others}
