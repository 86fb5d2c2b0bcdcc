"""sigmoid_loss against torch's logsigmoid."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkernels
from fedkernels import sigmoid_loss


def pairs(batch, d, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, batch, d, generator=generator, dtype=torch.float64)
    return both[0].to(dtype).requires_grad_(), both[1].to(dtype).requires_grad_()


def scalars(*values):
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def by_logsigmoid(image, text, logit_scale, logit_bias):
    signs = 2 * torch.eye(len(image), dtype=image.dtype) - 1
    return -F.logsigmoid(signs * (logit_scale * image @ text.T + logit_bias)).sum(dim=1).mean()


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 33), st.sampled_from([0.1, 1.0, 10.0]), st.sampled_from([-10.0, 0.0, 30.0]))
def test_equals_logsigmoid(batch, d, scale, bias):
    leaves = [*pairs(batch, d), *scalars(scale, bias)]
    loss, truth = sigmoid_loss(*leaves), by_logsigmoid(*leaves)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(sigmoid_loss(*leaves[:2], scale, bias), truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))
    losses = sigmoid_loss(*leaves, "none")
    torch.testing.assert_close((losses.mean(), losses.shape), (truth, (batch,)))
    torch.testing.assert_close(sigmoid_loss(*leaves, reduction="sum"), losses.sum())


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_more_pairs_than_the_compiled_operator_takes_at_a_time(wanted):
    """It has groups of 512 images, blocks of 256 texts and spans of 8 blocks."""
    image, text = (
        one.requires_grad_(want) for one, want in zip(map(torch.detach, pairs(2100, 3)), wanted, strict=True)
    )
    leaves = [one for one in (image, text) if one.requires_grad]
    loss, truth = sigmoid_loss(image, text, 1.5, -1.0), by_logsigmoid(image, text, 1.5, -1.0)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    function = functools.partial(sigmoid_loss, reduction=reduction)
    assert torch.autograd.gradcheck(function, (*pairs(5, 3), *scalars(1.7, -0.5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_summed_wide(dtype):
    image, text = pairs(33, 65, dtype)
    wide = [one.detach().double().requires_grad_() for one in (image, text)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = sigmoid_loss(image, text, 0.4, -3.0)
    truth = sigmoid_loss(*wide, 0.4, -3.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=2e-6, atol=0)
    of_truth = torch.autograd.grad(truth, wide)
    for narrow, other in zip(torch.autograd.grad(loss, [image, text]), of_truth, strict=True):
        assert narrow.dtype == dtype
        atol = 1e-5 * float(other.abs().max())
        torch.testing.assert_close(narrow.double(), other, rtol=2 * torch.finfo(dtype).eps, atol=atol)


@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_small_terms_keep_their_digits(bias):
    """Terms of exp(-20) beside each other, in float32: neither 1 + exp(-20) nor its logarithm may be formed."""
    image, text = (torch.zeros(40, 3) for _ in range(2))
    large, small = sorted([40 * math.log1p(math.exp(-bias)), 40 * 39 * math.log1p(math.exp(bias))], reverse=True)
    assert sigmoid_loss(image, text, 1.0, bias).item() == pytest.approx((large + small) / 40, rel=1e-6)
    few = sigmoid_loss(image[:1], text[:1], 1.0, 20.0).item()
    assert few == pytest.approx(math.exp(-20), rel=1e-6)


def test_compiles_without_a_graph_break():
    leaves = *pairs(5, 4), *scalars(0.5, 0.3)
    loss, truth = torch.compile(sigmoid_loss, fullgraph=True, backend="aot_eager")(*leaves), sigmoid_loss(*leaves)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


def test_nan_gives_nan():
    image, text = (one.detach() for one in pairs(5, 4))
    image[1, 2] = torch.nan
    assert sigmoid_loss(image, text, 1.0, 0.0).isnan()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(0, 3), torch.ones(0, 3), 1.0, 0.0), ValueError, "image must not be empty"),
        ((torch.ones(2, 3), torch.ones(3, 3), 1.0, 0.0), ValueError, r"text must have the shape \[2, 3\] of image"),
        ((torch.ones(2, 3), torch.ones(2, 3, device="meta"), 1.0, 0.0), ValueError, "text must be on the device"),
        ((torch.ones(2, 3).int(), torch.ones(2, 3), 1.0, 0.0), TypeError, "image must be float16"),
        ((torch.ones(2, 3), torch.ones(2, 3), -1.0, 0.0), ValueError, "logit_scale must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, 0.0, "max"), ValueError, "reduction must be one of"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, math.inf), ValueError, "logit_bias must be finite, got inf"),
        (
            (torch.ones(2, 3), torch.ones(2, 3), 1.0, torch.ones(2)),
            ValueError,
            "logit_bias must be a number or a tensor",
        ),
        (
            (torch.ones(2, 3), torch.ones(2, 3), 1.0, None),
            TypeError,
            "logit_bias must be a Python number or a floating",
        ),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        sigmoid_loss(*arguments)


def test_module_is_the_function():
    image, text = pairs(3, 4)
    module = fedkernels.nn.SigmoidLoss("none")
    assert torch.equal(module(image, text, 2.0, -1.0), sigmoid_loss(image, text, 2.0, -1.0, "none"))
