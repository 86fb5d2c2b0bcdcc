"""Parameters of a global model and of its clients, as delta_gram and apply_deltas read them."""

from __future__ import annotations

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


def size_of(shapes: list[torch.Size]) -> str:
    return f"K = {CLIENTS}, P = {sum(map(torch.Size.numel, shapes)) / 1e6:.3g} M in {len(shapes)} tensors"


def parameters(shapes: list[torch.Size]) -> Inputs:
    """float32: "global" and "clients", which differ from it by 1 % of its size, about half of that in common."""
    generator = torch.Generator().manual_seed(0)
    globals_ = [torch.randn(shape, generator=generator) for shape in shapes]
    common = [0.007 * torch.randn(shape, generator=generator) for shape in shapes]
    clients = [
        [p + c + 0.007 * torch.randn(p.shape, generator=generator) for p, c in zip(globals_, common, strict=True)]
        for _ in range(CLIENTS)
    ]
    return {"global": globals_, "clients": clients}
