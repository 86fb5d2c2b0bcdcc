"""lightly's NTXentLoss with its memory bank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels import distributed
from fedkernels.distributed._ranks import all_gather
from fedkernels.info_nce import info_nce
from fedkernels.nt_xent import nt_xent

__all__ = ["MemoryBankModule", "NTXentLoss"]


class NTXentLoss(nn.Module):
    """lightly's ``NTXentLoss``: it normalises the rows and, if asked to, takes negatives from all ranks.

    With ``memory_bank_size=(rows, dim)`` the negatives are those of a memory bank alone, as MoCo's, and the loss is
    that of out0's rows. If out0 requires a gradient, out1 enters the bank afterwards, with ``gather_distributed`` from
    all ranks. ``method="ring"`` keeps the memory of a rank without a bank at O(B d), see ``fedkernels.distributed``.
    """

    eps = 1e-8  # a temperature below is refused

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        *,
        method: distributed.Method = "gather",
    ) -> None:
        super().__init__()
        if not temperature >= self.eps:
            raise ValueError(f"temperature must be at least {self.eps}, got {temperature}")
        if gather_distributed and not dist.is_available():
            raise ValueError("gather_distributed must be False with this torch, which was built without distributed")
        self.memory_bank = MemoryBankModule(memory_bank_size, gather_distributed)
        self.temperature = temperature
        self.gather_distributed = gather_distributed
        self.method = method

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Computes the mean loss of this rank's 2B rows, out0 and out1 [B, d], or of out0's with a memory bank."""
        out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        if self.memory_bank.size[0] > 0:
            return self._with_bank(out0, out1)
        if self.gather_distributed and dist.is_initialized() and dist.get_world_size() > 1:
            return distributed.nt_xent(out0, out1, self.temperature, method=self.method)
        return nt_xent(out0, out1, self.temperature)

    def _with_bank(self, out0: Tensor, out1: Tensor) -> Tensor:
        bank = self.memory_bank.bank
        # Equal labels leave out the keys of the other rows; the bank's rows have a label of their own.
        of_rows = torch.zeros(len(out0), dtype=torch.int64, device=out0.device)
        labels = of_rows, torch.cat([of_rows, of_rows.new_ones(len(bank))])
        loss = info_nce(out0, out1, self.temperature, negatives=bank.to(out0.device), labels=labels)
        if out0.requires_grad:  # not in an evaluation without a graph, wherever the rows come from
            self.memory_bank.replace_oldest(out1.detach())
        return loss


class MemoryBankModule(nn.Module):
    """The rows of earlier batches: a buffer ``bank`` [rows, dim], and ``bank_ptr``, [1] int64, the oldest row's number.

    Neither is part of the state_dict. The bank begins with rows of normal random numbers, normalised.
    """

    bank: Tensor
    bank_ptr: Tensor

    def __init__(self, size: int | Sequence[int], gather_distributed: bool = False) -> None:
        super().__init__()
        shape = (size,) if isinstance(size, int) else tuple(size)
        if shape != (0,) and (len(shape) != 2 or min(shape) < 0):
            raise ValueError(f"memory_bank_size must be 0, or (rows, dim) of at least 0, got {size}: give both numbers")
        self.size = shape
        self.gather_distributed = gather_distributed
        bank = F.normalize(torch.randn(shape), dim=-1) if len(shape) == 2 else torch.empty(0)
        self.register_buffer("bank", bank, persistent=False)
        self.register_buffer("bank_ptr", torch.zeros(1, dtype=torch.int64), persistent=False)

    def replace_oldest(self, rows: Tensor) -> None:
        """Writes rows [B, dim] over the oldest ones. What would go beyond the bank's end is left out, as in lightly."""
        if self.gather_distributed and dist.is_initialized() and dist.get_world_size() > 1:
            everyones = rows.new_empty(dist.get_world_size() * len(rows), rows.shape[1])
            all_gather(everyones, rows.contiguous())
            rows = everyones
        begin = int(self.bank_ptr)
        rows = rows[: len(self.bank) - begin]
        end = begin + len(rows)
        self.bank[begin:end] = rows
        self.bank_ptr[0] = end % len(self.bank)
