"""lightly's NTXentLoss."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels import distributed
from fedkernels.compat.only_default import only_default
from fedkernels.nt_xent import nt_xent

__all__ = ["NTXentLoss"]


class NTXentLoss(nn.Module):
    """lightly's ``NTXentLoss``: it normalises the rows and, if asked to, takes negatives from all ranks.

    The memory bank is not supported. ``method="ring"`` keeps the memory of a rank at O(B d), see
    ``fedkernels.distributed``.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int = 0,
        gather_distributed: bool = False,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        only_default("lightly.loss.NTXentLoss", memory_bank_size=(memory_bank_size, 0))
        self.temperature = temperature
        self.gather_distributed = gather_distributed
        self.method = method

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """The mean loss of this rank's 2B rows, out0 and out1 [B, d]."""
        out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        if self.gather_distributed and dist.is_initialized() and dist.get_world_size() > 1:
            return distributed.nt_xent(out0, out1, self.temperature, method=self.method)
        return nt_xent(out0, out1, self.temperature)
