"""The distributed losses equal those of one process with the whole batch: values, all gradients, the scale's too."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fedkernels import distributed, info_nce
from tests.fedkernels.distributed.ranks import Ranks

DIM = 12
BIAS = -1.5
LOSSES = ["info_nce", "nt_xent", "clip_loss", "sigmoid_loss"]
SIZES = {"equal": (6, 6, 6, 6), "unequal": (5, 8, 1, 3)}


def batches(seed: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """The embeddings of all ranks, which each process draws alike."""
    generator = torch.Generator().manual_seed(seed)
    first = [F.normalize(torch.randn(size, DIM, generator=generator), dim=1).to(dtype) for size in sizes]
    second = [F.normalize(x.float() + torch.randn(x.shape, generator=generator), dim=1).to(dtype) for x in first]
    return first, second


def in_one_process(loss: str, first: Tensor, second: Tensor, temperature: Tensor) -> Tensor:
    """The losses of all rows, from the definitions."""
    if loss == "nt_xent":
        rows = torch.cat([first, second])
        logits = (rows @ rows.T / temperature).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(first)), reduction="none")
    logits = first @ second.T / temperature
    if loss == "sigmoid_loss":
        return -F.logsigmoid((2 * torch.eye(len(first)) - 1) * (logits + BIAS)).sum(dim=1)
    losses = F.cross_entropy(logits, torch.arange(len(first)), reduction="none")
    if loss == "clip_loss":
        losses = (losses + F.cross_entropy(logits.T, torch.arange(len(first)), reduction="none")) / 2
    return losses


def distributed_losses(loss: str, first: Tensor, second: Tensor, temperature: Tensor, **options: Any) -> Tensor:
    if loss in ("clip_loss", "sigmoid_loss"):
        options |= {"logit_bias": BIAS} if loss == "sigmoid_loss" else {}
        return getattr(distributed, loss)(first, second, 1 / temperature, **options)
    return getattr(distributed, loss)(first, second, temperature, **options)


def on_rank(loss: str, method: str, sizes: tuple[int, ...], reduction: str, dtype: torch.dtype) -> dict[str, Tensor]:
    rank = dist.get_rank()
    first, second = batches(0, sizes[: dist.get_world_size()], dtype)
    x, y = first[rank].requires_grad_(), second[rank].requires_grad_()
    temperature = torch.tensor(0.3, requires_grad=True)
    value = distributed_losses(loss, x, y, temperature, reduction=reduction, method=method)
    weights = torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape) if reduction == "none" else torch.tensor(1.0)
    (value * weights).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.dtype == y.grad.dtype == dtype
    return {"value": value.detach(), "first": x.grad, "second": y.grad, "temperature": temperature.grad}


def split_rows(loss: str, rows: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The rows of each rank; for nt_xent `rows` are the first views of all ranks and then the second ones."""
    if loss != "nt_xent":
        return list(rows.split(sizes))
    first, second = rows.chunk(2)
    return [torch.cat(parts) for parts in zip(first.split(sizes), second.split(sizes), strict=True)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_are_those_of_one_process(ranks: Ranks, loss, method, sizes, reduction):
    results = ranks(on_rank, loss, method, sizes, reduction, torch.float32)
    sizes = sizes[: len(results)]
    first, second = (torch.cat(part).double().requires_grad_() for part in batches(0, sizes))
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    losses = split_rows(loss, in_one_process(loss, first, second, temperature), sizes)
    if reduction == "none":
        values = losses
        total = sum((part * torch.linspace(0.5, 1.5, len(part))).sum() for part in losses)
    else:
        values = [part.sum() for part in losses]
        if reduction == "mean":
            values = [part * len(sizes) / sum(len(rows) for rows in losses) for part in values]
        total = sum(values)
    total.backward()
    if reduction == "mean":
        torch.testing.assert_close(sum(values) / len(sizes), torch.cat(losses).mean())
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    for result, value in zip(results, values, strict=True):
        torch.testing.assert_close(result["value"], value.detach(), **close)
    torch.testing.assert_close(torch.cat([result["first"] for result in results]), first.grad, **close)
    torch.testing.assert_close(torch.cat([result["second"] for result in results]), second.grad, **close)
    torch.testing.assert_close(sum(result["temperature"] for result in results), temperature.grad, **close)


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_is_widened(ranks: Ranks, loss, method):
    results = ranks(on_rank, loss, method, SIZES["unequal"], "mean", torch.bfloat16)
    sizes = SIZES["unequal"][: len(results)]
    first, second = (torch.cat(part).double().requires_grad_() for part in batches(0, sizes, torch.bfloat16))
    losses = in_one_process(loss, first, second, torch.tensor(0.3, dtype=torch.float64))
    (losses.mean() * len(sizes)).backward()
    value = sum(result["value"] for result in results) / len(results)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, losses.mean().detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    close = {"rtol": 0.01, "atol": 1e-3, "check_dtype": False}  # the gradients are rounded to bfloat16
    torch.testing.assert_close(torch.cat([result["first"] for result in results]), first.grad, **close)
    torch.testing.assert_close(torch.cat([result["second"] for result in results]), second.grad, **close)


def saved_elements(loss: str, method: str, rows: int) -> int:
    """The elements that are saved for the backward pass beside the inputs, and those of the inputs that are saved."""
    first, second = (part[dist.get_rank()].requires_grad_() for part in batches(0, (rows,) * dist.get_world_size()))
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = distributed_losses(loss, first, second, torch.tensor(0.3), method=method)
        elements = sum(saved.values())
    value.backward()
    return elements


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_saved_grows_with_this_ranks_batch_alone(ranks: Ranks, loss, method):
    rows = 256
    for elements in ranks(saved_elements, loss, method, rows):
        assert 2 * rows * DIM <= elements <= 2 * rows * DIM + 4 * rows + 64  # the embeddings and a few numbers a row


def two_pass_gradients(method: str, cached: bool) -> list[Tensor]:
    """The parameters' gradients, averaged over the ranks; `cached` as Gao et al. 2021 (GradCache) compute them."""
    torch.manual_seed(3)
    tower = torch.nn.Sequential(torch.nn.Linear(DIM, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    scale = torch.nn.Parameter(torch.tensor(2.0))
    first, second = (part[dist.get_rank()] for part in batches(1, (8,) * dist.get_world_size()))
    if cached:
        chunks = [*first.split(2), *second.split(2)]
        with torch.no_grad():
            embeddings = torch.cat([tower(chunk) for chunk in chunks]).requires_grad_()
        distributed.clip_loss(*embeddings.chunk(2), scale.exp(), method=method).backward()
        assert embeddings.grad is not None
        for chunk, gradient in zip(chunks, embeddings.grad.split(2), strict=True):
            tower(chunk).backward(gradient)
    else:
        distributed.clip_loss(tower(first), tower(second), scale.exp(), method=method).backward()
    gradients = [parameter.grad for parameter in [*tower.parameters(), scale]]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [gradient / dist.get_world_size() for gradient in gradients]


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_a_two_pass_gradient_cache_gives_the_same_gradients(ranks: Ranks, method):
    cached_gradients, gradients = (ranks(two_pass_gradients, method, cached) for cached in (True, False))
    for cached, whole in zip(cached_gradients, gradients, strict=True):
        torch.testing.assert_close(cached, whole, rtol=1e-5, atol=1e-6)


def in_a_subgroup() -> Tensor | None:
    group = dist.new_group([1, dist.get_world_size() - 1] if dist.get_world_size() > 2 else [1])
    if dist.get_rank() not in dist.get_process_group_ranks(dist.group.WORLD)[1:] or dist.get_rank(group) < 0:
        return None
    first, second = (part[dist.get_rank()].requires_grad_() for part in batches(2, SIZES["unequal"]))
    distributed.info_nce(first, second, 0.3, method="ring", group=group).backward()
    return second.grad


def test_a_subgroup_is_a_group_of_its_own(ranks: Ranks):
    results = ranks(in_a_subgroup)
    members = [1] if len(results) == 2 else [1, 3]
    first, second = (torch.cat([part[i] for i in members]).requires_grad_() for part in batches(2, SIZES["unequal"]))
    (in_one_process("info_nce", first, second, torch.tensor(0.3)).mean() * len(members)).backward()
    assert [index for index, result in enumerate(results) if result is not None] == members
    torch.testing.assert_close(torch.cat([results[i] for i in members]), second.grad, rtol=1e-5, atol=1e-5)


def key_without_gradient(method: str) -> tuple[Tensor | None, Tensor | None]:
    first, second = (part[dist.get_rank()] for part in batches(0, SIZES["equal"]))
    distributed.info_nce(first.requires_grad_(), second, 0.3, method=method).backward()
    return first.grad, second.grad


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_keys_without_a_gradient_get_none(ranks: Ranks, method):
    results = ranks(key_without_gradient, method)
    first, second = (torch.cat(part[: len(results)]) for part in batches(0, SIZES["equal"]))
    (in_one_process("info_nce", first.requires_grad_(), second, torch.tensor(0.3)).mean() * len(results)).backward()
    assert all(of_key is None for _, of_key in results)
    torch.testing.assert_close(torch.cat([of_query for of_query, _ in results]), first.grad, rtol=1e-5, atol=1e-5)


def with_negatives(method: str) -> list[Tensor]:
    rank = dist.get_rank()
    query, key = (part[rank].requires_grad_() for part in batches(0, SIZES["unequal"]))
    negatives = batches(1, SIZES["unequal"])[0][rank].requires_grad_()
    loss = distributed.info_nce(query, key, 0.3, negatives=negatives, method=method)
    return [loss.detach(), *torch.autograd.grad(loss, [query, key, negatives])]


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_every_query_sees_the_negatives_of_all_ranks(ranks: Ranks, method):
    results = ranks(with_negatives, method)
    parts = *batches(0, SIZES["unequal"]), batches(1, SIZES["unequal"])[0]
    leaves = [torch.cat(part[: len(results)]).requires_grad_() for part in parts]
    truth = info_nce(*leaves[:2], 0.3, negatives=leaves[2])
    values, *gradients = zip(*results, strict=True)
    torch.testing.assert_close(torch.stack(values).mean(), truth.detach())
    found = [torch.cat(parts) / len(results) for parts in gradients]
    torch.testing.assert_close(found, list(torch.autograd.grad(truth, leaves)), rtol=1e-5, atol=1e-5)


def bad_call(what: str) -> str:
    rank = dist.get_rank()
    query, key = torch.randn(3, 4), torch.randn(3, 4)
    method = "gather"
    if rank == 1:
        if what == "columns":
            query, key = torch.randn(3, 5), torch.randn(3, 5)
        elif what == "dtype":
            key = key.half()
        elif what == "method":
            method = "ring"
        elif what == "gradient":
            query.requires_grad_()
        elif what == "rows":
            query, key = query[:0], key[:0]
        elif what == "keys":
            key = key[:2]
        elif what == "loss":
            with pytest.raises(ValueError, match="must be the same") as error:
                distributed.nt_xent(query, key, 0.5)
            return str(error.value)
    with pytest.raises(ValueError, match="must") as error:
        distributed.info_nce(query, key, 0.5, method=method)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("columns", "the number of columns d must be the same on all ranks, got 4, 5"),
        ("dtype", "the dtype of the keys must be the same on all ranks, got torch.float32, torch.float16"),
        ("method", "method must be the same on all ranks, got gather, ring"),
        ("gradient", "whether an input requires a gradient must be the same on all ranks, got no, yes"),
        ("loss", "the loss must be the same on all ranks, got info_nce or clip_loss, nt_xent"),
        ("rows", r"each rank must have at least one row, got \[3, 0"),
        ("keys", r"each rank must have at least as many keys as queries, got \[3, 2"),
    ],
)
def test_all_ranks_get_the_error_of_one(ranks: Ranks, what, message):
    for text in ranks(bad_call, what):
        assert re.search(message, text), text


def loss_without_rank_1(method: str) -> str:
    if dist.get_rank() == 1:
        os._exit(1)
    query = torch.randn(3, 4, requires_grad=True)
    try:
        distributed.info_nce(query, torch.randn(3, 4), 0.5, method=method).backward()
    except RuntimeError as error:  # torch.distributed.DistError is one
        return str(error)
    return "no error"


@pytest.mark.parametrize("method", ["gather", "ring"])
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
