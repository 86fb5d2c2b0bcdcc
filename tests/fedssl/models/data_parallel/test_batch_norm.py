"""BatchNorm over the shares of two processes against torch's own over the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedssl.models.data_parallel import Share, StatisticsOfWholeBatch
from fedssl.models.model import untouched_running_statistics

LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "vectors": ({}, (6, 5)),
    "one row a process": ({}, (2, 5)),
    "sequences": ({}, (6, 5, 3)),
    "images": ({}, (6, 5, 4, 3)),
    "without weights": ({"affine": False}, (6, 5, 4, 3)),
    "without running statistics": ({"track_running_stats": False}, (6, 5)),
    "mean over all batches": ({"momentum": None}, (6, 5)),
}


def made(options: dict[str, Any], dims: int, dtype: torch.dtype) -> nn.Module:
    """A layer with weights and running statistics of its own."""
    layer = (nn.BatchNorm2d if dims == 4 else nn.BatchNorm1d)(5, **options).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(5, generator=generator) + 0.5)
    return layer


def outcome(layer: nn.Module, x: Tensor, by_output: Tensor) -> list[Tensor]:
    """Of two steps: outputs, the gradient in x, those in the weights, and the layer's buffers."""
    found = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        out = layer(x)
        (out.to(by_output.dtype) * by_output).sum().backward()
        assert x.grad is not None
        found += [out.detach(), x.grad]
        x = out
    return [*found, *(p.grad for p in layer.parameters()), *(b.clone() for b in layer.buffers())]


def of_share(x: Tensor, by_output: Tensor, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    rank = dist.get_rank()
    with StatisticsOfWholeBatch():
        found = outcome(made(options, x.dim(), dtype), x.chunk(2)[rank], by_output.chunk(2)[rank])
    weights = [found[i] for i in range(4, 4 + 2 * options.get("affine", True))]
    Share(rank, 2).average(weights)
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_those_of_the_whole_batch(layer, two_ranks):
    options, shape = LAYERS[layer]
    generator = torch.Generator().manual_seed(1)
    x = 3 + torch.randn(shape, generator=generator, dtype=torch.float64)
    by_output = torch.randn(shape, generator=generator, dtype=torch.float64)
    whole = outcome(made(options, x.dim(), torch.float64), x, by_output)
    shares = two_ranks(of_share, x, by_output, options, torch.float64)
    for number, expected in enumerate(whole):
        if number < 4:  # outputs and gradients in x are those of the shares
            got = torch.cat([share[number] for share in shares])
        elif number < 4 + 2 * options.get("affine", True):  # averaged over the two processes
            got = 2 * shares[0][number]
        else:
            got = shares[0][number]
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    for one, other in zip(shares[0][4:], shares[1][4:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_have_float32_statistics(dtype, two_ranks):
    """As under autocast: the layer's weights are float32, its output has the dtype of its input."""
    generator = torch.Generator().manual_seed(2)
    x = (100 + torch.randn(8, 5, 6, 6, generator=generator)).to(dtype).contiguous(memory_format=torch.channels_last)
    by_output = torch.randn(x.shape, generator=generator)
    whole = outcome(made({}, 4, torch.float32), x, by_output)
    shares = two_ranks(of_share, x, by_output, {}, torch.float32)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05  # of a mean of 100 and a deviation of 1
    for number in range(2):
        got = torch.cat([share[number] for share in shares])
        assert got.dtype == dtype
        torch.testing.assert_close(got, whole[number], atol=tolerance, rtol=tolerance)
        assert shares[0][number].is_contiguous(memory_format=torch.channels_last)
    for got, expected in zip(shares[0][-3:-1], whole[-3:-1], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def of_share_in_other_modes(x: Tensor) -> list[Tensor]:
    share = x.chunk(2)[dist.get_rank()]
    layer = made({}, 2, torch.float64)
    with StatisticsOfWholeBatch():
        with untouched_running_statistics(layer):
            untouched = layer(share)
        return [untouched.detach(), layer.eval()(share).detach(), layer.running_mean]


def test_other_modes_are_torchs_own(two_ranks):
    """Running statistics that shall stay as they are do, and evaluation mode normalises by them."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    layer = made({}, 2, torch.float64)
    shares = two_ranks(of_share_in_other_modes, x)
    before = layer.running_mean.clone()
    torch.testing.assert_close(torch.cat([share[1] for share in shares]), layer.eval()(x).detach())
    torch.testing.assert_close(torch.cat([share[0] for share in shares]), layer.train()(x).detach())
    assert torch.equal(shares[0][2], before)
