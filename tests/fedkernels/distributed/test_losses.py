"""The distributed losses equal those of one process with the whole batch: values, all gradients, the scale's too."""

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fedkernels import distributed
from tests.fedkernels import definitions
from tests.fedkernels.distributed.ranks import Ranks

DIM = 12
BIAS = -1.5
LOSSES = ["info_nce", "nt_xent", "clip_loss", "sigmoid_loss"]
EVERY_LOSS = [*LOSSES, "supervised_contrastive_loss", "info_nce with negatives"]
SIZES = {"equal": (6, 6, 6, 6), "unequal": (5, 8, 1, 3)}
LABELS = torch.tensor([0, 1, 1, 2, 0, 3, 0, 9, 1, 4, 2, 5, 0, 6, 3, 1, 8, 0, 2, 2, 4, 7, 1, 0])  # 5, 6, ... are alone
METHOD = pytest.mark.parametrize("method", ["gather", "ring"])
Problem = tuple[str, tuple[int, ...], torch.dtype, float]  # loss, sizes of the ranks, dtype, temperature


def batches(seed: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """The embeddings of all ranks, which each process draws alike."""
    generator = torch.Generator().manual_seed(seed)
    first = [F.normalize(torch.randn(size, DIM, generator=generator), dim=1).to(dtype) for size in sizes]
    second = [F.normalize(x.float() + torch.randn(x.shape, generator=generator), dim=1).to(dtype) for x in first]
    return first, second


def inputs(loss: str, sizes: tuple[int, ...], dtype: torch.dtype) -> list[list[Tensor]]:
    """The rows of all ranks, once for each input of the loss."""
    first, second = batches(0, sizes, dtype)
    if loss == "supervised_contrastive_loss":
        return [first]
    return [first, second, batches(1, sizes, dtype)[0]] if loss == "info_nce with negatives" else [first, second]


def in_one_process(loss: str, rows: list[Tensor], temperature: Tensor) -> tuple[Tensor, int]:
    """The losses of all rows, from the definitions, and how many of them count in the mean."""
    if loss == "supervised_contrastive_loss":
        labels = LABELS[: len(rows[0])]
        losses = definitions.supervised_contrastive_loss(*rows, labels, temperature)
        return losses, int(definitions.positives_of(labels).any(1).sum())
    if loss in ("clip_loss", "sigmoid_loss"):
        losses = getattr(definitions, loss)(*rows, 1 / temperature, *[BIAS][: loss == "sigmoid_loss"])
    else:
        name = loss.removesuffix(" with negatives")
        losses = getattr(definitions, name)(rows[0], torch.cat(rows[1:]), temperature)
    return losses, len(losses)


def distributed_losses(
    loss: str, rows: list[Tensor], temperature: Tensor, labels: Any = None, **options: Any
) -> Tensor:
    if loss in ("clip_loss", "sigmoid_loss"):
        options |= {"logit_bias": BIAS} if loss == "sigmoid_loss" else {}
        return getattr(distributed, loss)(*rows, 1 / temperature, **options)
    if loss == "supervised_contrastive_loss":
        return distributed.supervised_contrastive_loss(*rows, labels, temperature, **options)
    if loss == "info_nce with negatives":
        return distributed.info_nce(*rows[:2], temperature, negatives=rows[2], **options)
    return getattr(distributed, loss)(*rows, temperature, **options)


def weighted(value: Tensor) -> Tensor:
    return (value * (torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape) if value.ndim else 1)).sum()


def on_rank(problem: Problem, method: str, reduction: str) -> list[Tensor]:
    """The value, and the gradients of the rows and of the temperature."""
    loss, sizes, dtype, temperature = problem
    rank, sizes = dist.get_rank(), sizes[: dist.get_world_size()]
    rows = [part[rank].requires_grad_() for part in inputs(loss, sizes, dtype)]
    scale = torch.tensor(temperature, requires_grad=True)
    labels = LABELS[: sum(sizes)].split(sizes)[rank]
    value = distributed_losses(loss, rows, scale, labels, reduction=reduction, method=method)
    return [value.detach(), *torch.autograd.grad(weighted(value), [*rows, scale])]


def split_rows(loss: str, rows: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The rows of each rank; for nt_xent `rows` are the first views of all ranks and then the second ones."""
    if loss != "nt_xent":
        return list(rows.split(sizes))
    first, second = rows.chunk(2)
    return [torch.cat(parts) for parts in zip(first.split(sizes), second.split(sizes), strict=True)]


def assert_equals_one_process(results: list[list[Tensor]], problem: Problem, reduction: str) -> None:
    loss, sizes, dtype, number = problem
    sizes = sizes[: len(results)]
    rows = [torch.cat(part).double().requires_grad_() for part in inputs(loss, sizes, dtype)]
    temperature = torch.tensor(number, dtype=torch.float64, requires_grad=True)
    losses, counted = in_one_process(loss, rows, temperature)
    values = split_rows(loss, losses, sizes)
    if reduction != "none":
        values = [part.sum() * (len(sizes) / counted if reduction == "mean" else 1) for part in values]
    *of_rows, of_temperature = torch.autograd.grad(sum(weighted(value) for value in values), [*rows, temperature])
    found, *gradients, temperatures = zip(*results, strict=True)
    assert {part.dtype for part in found} == {torch.float64 if dtype == torch.float64 else torch.float32}
    for ours, truth in zip(found, values, strict=True):
        torch.testing.assert_close(ours.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    rounding = max(5e-6, torch.finfo(dtype).eps)  # the gradients are rounded to half precision
    for parts, truth in zip(gradients, of_rows, strict=True):
        assert {part.dtype for part in parts} == {dtype}
        atol = rounding * max(1.0, float(truth.abs().max()))
        torch.testing.assert_close(torch.cat(parts).double(), truth, rtol=2 * rounding, atol=atol)
    torch.testing.assert_close(sum(temperatures).double(), of_temperature, rtol=1e-4, atol=1e-4)


FLOAT32, UNEQUAL = torch.float32, SIZES["unequal"]
# Sizes, dtype and reduction. Sums are at least float32, whatever the dtype is.
KINDS = [
    *((UNEQUAL, FLOAT32, reduction) for reduction in ("mean", "sum", "none")),
    *((UNEQUAL, dtype, "mean") for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    (SIZES["equal"], FLOAT32, "mean"),
]
CASES: list[tuple[Problem, str]] = [
    *(((loss, sizes, dtype, 0.3), reduction) for loss in EVERY_LOSS for sizes, dtype, reduction in KINDS),
    (("supervised_contrastive_loss", UNEQUAL, FLOAT32, 0.01), "none"),
]


@METHOD
@pytest.mark.parametrize(("problem", "reduction"), CASES, ids=str)
def test_values_and_gradients_are_those_of_one_process(ranks: Ranks, problem, method, reduction):
    assert_equals_one_process(ranks(on_rank, problem, method, reduction), problem, reduction)


def saved_elements(loss: str, method: str, rows: int) -> int:
    """The elements that are saved for the backward pass beside the inputs, and those of the inputs that are saved."""
    given = [part[dist.get_rank()].requires_grad_() for part in batches(0, (rows,) * dist.get_world_size())]
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = distributed_losses(loss, given, torch.tensor(0.3), method=method)
        elements = sum(saved.values())
    value.backward()
    return elements


@METHOD
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_saved_grows_with_this_ranks_batch_alone(ranks: Ranks, loss, method):
    rows = 256
    for elements in ranks(saved_elements, loss, method, rows):
        assert 2 * rows * DIM <= elements <= 2 * rows * DIM + 4 * rows + 64  # the embeddings and a few numbers a row


def in_a_subgroup() -> Tensor | None:
    group = dist.new_group([1, dist.get_world_size() - 1] if dist.get_world_size() > 2 else [1])
    if dist.get_rank(group) < 0:
        return None
    first, second = (part[dist.get_rank()].requires_grad_() for part in batches(2, SIZES["unequal"]))
    distributed.info_nce(first, second, 0.3, method="ring", group=group).backward()
    return second.grad


def test_a_subgroup_is_a_group_of_its_own(ranks: Ranks):
    results = ranks(in_a_subgroup)
    members = [1] if len(results) == 2 else [1, 3]
    first, second = (torch.cat([part[i] for i in members]).requires_grad_() for part in batches(2, SIZES["unequal"]))
    (in_one_process("info_nce", [first, second], torch.tensor(0.3))[0].mean() * len(members)).backward()
    assert [index for index, result in enumerate(results) if result is not None] == members
    torch.testing.assert_close(torch.cat([results[i] for i in members]), second.grad, rtol=1e-5, atol=1e-5)


def key_without_gradient(method: str) -> tuple[Tensor | None, Tensor]:
    """The key's gradient, and by how much that of the query differs from the one beside a gradient of the key."""
    first, second = (part[dist.get_rank()] for part in batches(0, SIZES["equal"]))
    distributed.info_nce(first.requires_grad_(), second, 0.3, method=method).backward()
    none, alone, first.grad = second.grad, first.grad, None
    distributed.info_nce(first, second.requires_grad_(), 0.3, method=method).backward()
    return none, (first.grad - alone).abs().max()


@METHOD
def test_keys_without_a_gradient_get_none(ranks: Ranks, method):
    for of_key, difference in ranks(key_without_gradient, method):
        assert of_key is None
        assert difference < 1e-6


# What rank 1 gives otherwise than the others, query, key, loss and method, and the error that all get.
SAME, LOSS = torch.ones(3, 4), distributed.info_nce
DIFFERENT: dict[str, tuple[tuple[Any, ...], str]] = {
    "columns": (
        (torch.ones(3, 5), torch.ones(3, 5), LOSS, "gather"),
        "the number of columns d must be the same on all ranks, got 4, 5",
    ),
    "dtype": (
        (SAME, SAME.half(), LOSS, "gather"),
        "the dtype of the keys must be the same on all ranks, got torch.float32, torch.float16",
    ),
    "method": ((SAME, SAME, LOSS, "ring"), "method must be the same on all ranks, got gather, ring"),
    "gradient": (
        (torch.ones(3, 4, requires_grad=True), SAME, LOSS, "gather"),
        "whether an input requires a gradient must be the same on all ranks, got no, yes",
    ),
    "loss": (
        (SAME, SAME, distributed.nt_xent, "gather"),
        "the loss must be the same on all ranks, got info_nce or clip_loss, nt_xent",
    ),
    "rows": ((SAME[:0], SAME[:0], LOSS, "gather"), r"each rank must have at least one row, got \[3, 0"),
    "keys": ((SAME, SAME[:2], LOSS, "gather"), r"each rank must have at least as many keys as queries, got \[3, 2"),
}


def bad_call(what: str) -> str:
    query, key, loss, method = DIFFERENT[what][0] if dist.get_rank() == 1 else (SAME, SAME, LOSS, "gather")
    with pytest.raises(ValueError, match="must") as error:
        loss(query, key, 0.5, method=method)
    return str(error.value)


@pytest.mark.parametrize("what", DIFFERENT)
def test_all_ranks_get_the_error_of_one(ranks: Ranks, what):
    for text in ranks(bad_call, what):
        assert re.search(DIFFERENT[what][1], text), text


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group, or use the loss of the same"):
        distributed.info_nce(SAME, SAME, 0.5)


def loss_without_rank_1(method: str) -> str:
    if dist.get_rank() == 1:
        os._exit(1)
    query = torch.randn(3, 4, requires_grad=True)
    try:
        distributed.info_nce(query, torch.randn(3, 4), 0.5, method=method).backward()
    except RuntimeError as error:  # torch.distributed.DistError is one
        return str(error)
    return "no error"


@METHOD
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path, method):
    group = Ranks(3, tmp_path)
    for pipe in group.pipes:
        pipe.send((loss_without_rank_1, (method,)))
    try:
        for rank in (0, 2):
            succeeded, message = group.pipes[rank].recv()
            assert succeeded
            assert message != "no error"
    finally:
        group.stop()
