"""SIGReg, as its definition says: the yardstick of `fedkernels.sigreg`. It holds B x S x T complex numbers."""

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast


def sigreg(rows: Tensor, directions: Tensor, points: int = 17, limit: float = 5.0) -> Tensor:
    """The mean over directions [d, S] of the Epps-Pulley statistic of rows [B, d]; see `fedkernels.sigreg`."""
    dtype = compute_dtype(rows, directions)
    with no_autocast(rows):
        t = torch.linspace(-limit, limit, points, dtype=dtype, device=rows.device)
        turned = torch.exp(1j * (rows.to(dtype) @ unit(directions, dtype)).unsqueeze(-1) * t)
        found = turned.sum(0) / rows.shape[0]  # torch.export would make mean(0) one of this number of rows alone
        wanted = (-t.square() / 2).exp()
        return torch.trapezoid((found - wanted).abs().square() * wanted, t).mean() * rows.shape[0]


def unit(directions: Tensor, dtype: torch.dtype) -> Tensor:
    """The columns with length 1, whatever length above 0 they have; columns of zeros stay. They get no gradient."""
    directions = directions.detach().to(dtype)
    largest = directions.abs().amax(0)
    power = torch.where(largest > 0, largest / (2 * torch.frexp(largest).mantissa), 1)  # of two: nothing is rounded
    return torch.nn.functional.normalize(directions / power, dim=0)
