"""NTXentLoss with a memory bank: the loss by its definition, and the bank by a queue."""

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fedkernels.compat import lightly
from tests.fedkernels.compat.losses import CLOSE, value_and_gradients
from tests.fedkernels.distributed.ranks import Ranks

SIZES = [(11, 5), (12, 5), (4, 5)]  # of which 6 rows are no divisor, a divisor, and more than all


def views(step: int, gradient: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(6, 5, generator=generator).requires_grad_(gradient) for _ in range(2)]


def steps(loss: Any, first: int = 0) -> list[Tensor]:
    """Values, gradients and the bank of five calls; the third is an evaluation, which leaves the bank as it is."""
    found = []
    for step in range(5):
        given = views(first + step, gradient=step != 2)
        value = loss(*given)
        found += [value.detach(), loss.memory_bank.bank.clone(), loss.memory_bank.bank_ptr.clone()]
        if step != 2:
            found += torch.autograd.grad(value, given)
    return found


def with_bank(size: tuple[int, int], cls: Any = lightly.NTXentLoss, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(0.3, memory_bank_size=size, **options)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_loss_is_that_of_the_positive_and_the_bank(size):
    """Which an evaluation, a call without gradients, leaves as it is."""
    loss, begin = with_bank(size), 0
    torch.manual_seed(0)
    bank = F.normalize(torch.randn(size), dim=-1)
    torch.testing.assert_close(loss.memory_bank.bank, bank)
    for step in range(5):
        given = views(step)

        def definition(out0: Tensor, out1: Tensor) -> Tensor:
            out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
            logits = torch.cat([(out0 * out1).sum(dim=1, keepdim=True), out0 @ bank.T], dim=1) / 0.3
            return F.cross_entropy(logits, torch.zeros(6, dtype=torch.int64))

        expected = value_and_gradients(definition, *given)
        torch.testing.assert_close(value_and_gradients(loss, *given), expected, **CLOSE)
        written = min(6, size[0] - begin)
        bank[begin : begin + written] = F.normalize(given[1], dim=1)[:written].detach()
        begin = (begin + written) % size[0]
        loss(*views(9, gradient=False))
        with torch.no_grad():
            loss(*views(9))
        torch.testing.assert_close(loss.memory_bank.bank, bank)
        assert int(loss.memory_bank.bank_ptr) == begin
    assert list(dict(loss.named_buffers())) == ["memory_bank.bank", "memory_bank.bank_ptr"]
    assert loss.state_dict() == {}


@pytest.mark.parametrize("size", [0, (0,), (0, 5)], ids=str)
def test_a_bank_of_no_rows_is_none(size):
    torch.testing.assert_close(with_bank(size)(*views(0)), lightly.NTXentLoss(0.3)(*views(0)))


@pytest.mark.parametrize("size", [*SIZES, (0, 5)], ids=str)
def test_the_bank_is_the_originals(size):
    originals = pytest.importorskip("lightly.loss", reason="lightly is not installed")
    found = []
    for cls in (lightly.NTXentLoss, originals.NTXentLoss):
        loss = with_bank(size, cls)
        found.append([torch.rand(1), *steps(loss)] if size[0] else [torch.rand(1), loss(*views(0)).detach()])
        assert loss.memory_bank.size == size
    torch.testing.assert_close(*found, **CLOSE)


def bank_on_ranks(original: bool) -> list[Tensor]:
    cls = importlib.import_module("lightly.loss" if original else "fedkernels.compat.lightly").NTXentLoss
    return steps(with_bank((11, 5), cls, gather_distributed=True), first=10 * dist.get_rank())


def test_on_several_ranks_the_bank_takes_the_rows_of_all(ranks: Ranks):
    results = ranks(bank_on_ranks, False)
    rows = [F.normalize(views(10 * rank)[1], dim=1).detach() for rank in range(len(results))]
    for result in results:
        torch.testing.assert_close(result[1], torch.cat(rows)[:11], **CLOSE)  # 18 rows, from the first on


def test_on_several_ranks_the_bank_is_the_originals(ranks: Ranks):
    pytest.importorskip("lightly.loss", reason="lightly is not installed")
    torch.testing.assert_close(ranks(bank_on_ranks, False), ranks(bank_on_ranks, True), **CLOSE)
