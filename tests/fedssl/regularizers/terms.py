"""What tests of single terms share: as much of a client's round as a term looks at, and representations to measure."""

import torch
import torch.nn.functional as F

from fedssl.objectives.base import Step
from fedssl.regularizers.uniformity import sphere_samples


class Local:
    """As much of a client's round as the terms look at."""

    def __init__(self):
        self.logged = {}

    def device_generator(self, purpose):
        return torch.Generator().manual_seed(0)

    def log(self, name, value):
        self.logged.setdefault(name, []).append(value)


def step_of(*views):
    return Step(torch.tensor(0.0), representations=views, projections=views)


def representations(kind):
    """B = 128 unit vectors of 512 entries, and as many samples of the sphere."""
    generator = torch.Generator().manual_seed(0)
    if kind == "random":
        z = torch.randn(128, 512, generator=generator)
    elif kind == "low rank":
        z = torch.randn(128, 5, generator=generator) @ torch.randn(5, 512, generator=generator)
    else:
        z = torch.randn(1, 512, generator=generator) + 1e-3 * torch.randn(128, 512, generator=generator)
    return F.normalize(z, dim=1), sphere_samples(128, 512, generator)
