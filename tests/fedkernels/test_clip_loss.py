"""clip_loss against torch's cross-entropy in both directions."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkernels
from fedkernels import clip_loss


def pairs(batch, d, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    both = scale * torch.randn(2, batch, d, generator=generator, dtype=torch.float64)
    return both[0].to(dtype).requires_grad_(), both[1].to(dtype).requires_grad_()


def by_cross_entropy(image, text, logit_scale):
    numbers = torch.arange(len(image))
    logits = logit_scale * image @ text.T
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 33), st.sampled_from([0.1, 1.0, 14.3]))
def test_equals_cross_entropy_in_both_directions(batch, d, scale):
    image, text = pairs(batch, d)
    logit_scale = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    leaves = [image, text, logit_scale]
    loss, truth = clip_loss(image, text, logit_scale), by_cross_entropy(image, text, logit_scale)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(clip_loss(image, text, scale), truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))
    losses = clip_loss(image, text, scale, "none")
    torch.testing.assert_close((losses.mean(), losses.shape), (truth, (batch,)))
    torch.testing.assert_close(clip_loss(image, text, scale, reduction="sum"), losses.sum())


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_more_pairs_than_the_compiled_operator_takes_at_a_time(wanted):
    """It has groups of 512 images, blocks of 256 texts and spans of 8 blocks."""
    image, text = (
        one.requires_grad_(want) for one, want in zip(map(torch.detach, pairs(2100, 3)), wanted, strict=True)
    )
    leaves = [one for one in (image, text) if one.requires_grad]
    loss, truth = clip_loss(image, text, 1.5), by_cross_entropy(image, text, 1.5)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    logit_scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(functools.partial(clip_loss, reduction=reduction), (*pairs(5, 3), logit_scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_are_summed_wide(dtype):
    image, text = pairs(33, 65, dtype)
    wide = [one.detach().double().requires_grad_() for one in (image, text)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = clip_loss(image, text, 0.4)
    truth = clip_loss(*wide, 0.4)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), truth, rtol=2e-6, atol=0)
    of_truth = torch.autograd.grad(truth, wide)
    for narrow, other in zip(torch.autograd.grad(loss, [image, text]), of_truth, strict=True):
        assert narrow.dtype == dtype
        atol = 1e-5 * float(other.abs().max())
        torch.testing.assert_close(narrow.double(), other, rtol=2 * torch.finfo(dtype).eps, atol=atol)


def test_a_small_loss_is_not_rounded_to_the_size_of_the_logits():
    image = torch.eye(16).requires_grad_()
    truth = math.log1p(15 * math.exp(-8))
    shifted = image + 10  # logits of 80 and 88
    loss = clip_loss(image, image.detach(), 8.0)
    assert loss.item() == pytest.approx(truth, rel=1e-5)
    assert clip_loss(shifted, image.detach(), 8.0).item() == pytest.approx(truth, rel=1e-4)


def test_strides_do_not_matter():
    image, text = pairs(6, 4)
    strided = torch.stack([text.detach(), text.detach() + 1], dim=-1)[..., 0]
    torch.testing.assert_close(clip_loss(image.T.contiguous().T, strided, 2.0), clip_loss(image, text, 2.0))


def test_compiles_without_a_graph_break():
    leaves = *pairs(5, 4), torch.tensor(0.5, requires_grad=True)
    loss, truth = torch.compile(clip_loss, fullgraph=True, backend="aot_eager")(*leaves), clip_loss(*leaves)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, leaves))


def test_nan_and_infinity_give_nan():
    for bad in (torch.nan, torch.inf):
        image, text = (one.detach() for one in pairs(5, 4))
        image[1, 2] = bad
        assert clip_loss(image, text, 1.0).isnan()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(0, 3), torch.ones(0, 3), 1.0), ValueError, "image must not be empty"),
        ((torch.ones(2, 3), torch.ones(3, 3), 1.0), ValueError, r"text must have the shape \[2, 3\] of image"),
        ((torch.ones(2), torch.ones(2, 3), 1.0), ValueError, r"image must have shape \[B, d\]"),
        ((torch.ones(2, 3), torch.ones(2, 3, device="meta"), 1.0), ValueError, "text must be on the device"),
        ((torch.ones(2, 3), torch.ones(2, 3).int(), 1.0), TypeError, "text must be float16"),
        ((torch.ones(2, 3), torch.ones(2, 3), 0.0), ValueError, "logit_scale must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, "max"), ValueError, "reduction must be one of"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.tensor(0.0)), ValueError, "logit_scale must be positive"),
        (
            (torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)),
            ValueError,
            "logit_scale must be a number or a tensor of",
        ),
        ((torch.ones(2, 3), torch.ones(2, 3), None), TypeError, "logit_scale must be a Python number or a floating"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        clip_loss(*arguments)


def test_module_is_the_function():
    image, text = pairs(3, 4)
    assert torch.equal(fedkernels.nn.CLIPLoss("sum")(image, text, 2.0), clip_loss(image, text, 2.0, "sum"))
