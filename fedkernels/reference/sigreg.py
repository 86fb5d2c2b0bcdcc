"""SIGReg, as its definition says: the yardstick of `fedkernels.sigreg`. It holds B x S x T complex numbers."""

import torch
from torch import Tensor

from fedkernels.reference._precision import compute_dtype, no_autocast


def sigreg(rows: Tensor, directions: Tensor, points: int = 17, limit: float = 5.0) -> Tensor:
    """The mean over directions [d, S] of the Epps-Pulley statistic of rows [B, d]; see `fedkernels.sigreg`."""
    dtype = compute_dtype(rows, directions)
    with no_autocast(rows):
        along = torch.nn.functional.normalize(directions.to(dtype), dim=0)
        t = torch.linspace(-limit, limit, points, dtype=dtype, device=rows.device)
        found = torch.exp(1j * (rows.to(dtype) @ along).unsqueeze(-1) * t).mean(0)
        wanted = (-t.square() / 2).exp()
        return torch.trapezoid((found - wanted).abs().square() * wanted, t).mean() * len(rows)
