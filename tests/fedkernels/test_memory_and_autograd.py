"""Inputs and outputs that share memory, inputs that change before the backward pass, subclasses, second derivatives."""

import math

import pytest
import torch

from fedkernels import (
    client_weights,
    delta_gram,
    info_nce,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    nt_xent,
    unbalanced_ot,
    unbalanced_ot_plan,
)
from fedkernels.internal import native

FP32, FP64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf


def randn(*shape, seed=0, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


MEMORY = torch.arange(24, dtype=FP64).sin()
# name: function of one tensor [4, 4]
OF_ONE = {
    "info_nce": lambda x: info_nce(x, x, 0.5),
    "info_nce, not reduced": lambda x: info_nce(x, x, 0.5, "none"),
    "nt_xent": lambda x: nt_xent(x, x, 0.5),
    "linear_cka": lambda x: linear_cka(x, x[:, :2]),
    "linear_cka_to_kernel": lambda x: linear_cka_to_kernel(x, x @ x.T),
    "linear_cka_pairwise": lambda x: linear_cka_pairwise([x, x[:, :2]], [x]),
    "unbalanced_ot": lambda x: unbalanced_ot(x, x[:, 0].abs(), x[0].abs(), 0.8, 0.9, tol=1e-9),
    "unbalanced_ot_plan": lambda x: unbalanced_ot_plan(x, 1.0, 1.0, 0.8, 0.9)[0],
    "client_weights": lambda x: client_weights((x + x.T) * torch.ones(4) + 9 * torch.eye(4)),
    "client_weights, as given": lambda x: client_weights((x.T @ x).as_strided((4, 4), (4, 1))),
    "delta_gram": lambda x: delta_gram([x], [[x], [x.T], [x[:1].expand(4, 4)]]),
}
OVERLAPPING = {
    "windows": MEMORY.as_strided((4, 4), (1, 1)),
    "one row": MEMORY[:4].expand(4, 4),
    "one column": MEMORY[:4, None].expand(4, 4),
    "one entry": MEMORY[1].expand(4, 4),
    "transposed": MEMORY[:16].view(4, 4).T,
    "reversed in steps": MEMORY.as_strided((4, 4), (1, 5), 2),
}


@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.parametrize("view", OVERLAPPING)
def test_overlapping_input_is_read_as_if_it_did_not(name, view):
    function, before = OF_ONE[name], MEMORY.clone()
    leaf, plain = OVERLAPPING[view].detach().requires_grad_(), OVERLAPPING[view].clone().requires_grad_()
    value, truth = function(leaf), function(plain)
    torch.testing.assert_close(value, truth)
    if value.requires_grad:
        grads = torch.autograd.grad(value.sum(), leaf)[0], torch.autograd.grad(truth.sum(), plain)[0]
        torch.testing.assert_close(*grads)
    assert torch.equal(MEMORY, before)


@pytest.mark.parametrize("name", OF_ONE)
def test_outputs_never_share_memory_with_inputs(name):
    leaf = randn(4, 4, seed=1).requires_grad_()
    version, value = leaf._version, OF_ONE[name](leaf)
    outputs = [value]
    if value.requires_grad:
        outputs += torch.autograd.grad(value.sum(), leaf)
    assert len({tensor.untyped_storage().data_ptr() for tensor in [leaf, *outputs]}) == 1 + len(outputs)
    assert leaf._version == version


@pytest.mark.parametrize(
    "name", [name for name in OF_ONE if not name.startswith(("unbalanced_ot_p", "client", "delta"))]
)
def test_a_leaf_may_be_used_again(name):
    """Twice in one call, in two calls, and for two backward passes."""
    function, leaf = OF_ONE[name], randn(4, 4, seed=1).requires_grad_()
    value = function(leaf).sum()
    once = torch.autograd.grad(value, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(value, leaf, retain_graph=True)[0], once)
    value.backward()
    torch.testing.assert_close(leaf.grad, once, rtol=0, atol=0)
    (function(leaf).sum() + function(leaf).sum()).backward()
    torch.testing.assert_close(leaf.grad, 3 * once)
    # Two names for the same values are two inputs, whose gradients add up.
    other = leaf.detach().clone().requires_grad_()
    if name == "info_nce":
        torch.testing.assert_close(sum(torch.autograd.grad(info_nce(leaf, other, 0.5), [leaf, other])), once)
    if name == "nt_xent":
        torch.testing.assert_close(sum(torch.autograd.grad(nt_xent(leaf, other, 0.5), [leaf, other])), once)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "linear_cka"])
def test_gradients_formed_with_the_value_do_not_read_their_inputs_again(name):
    leaf = randn(4, 4, seed=1).requires_grad_()
    truth = torch.autograd.grad(OF_ONE[name](leaf), leaf)[0]
    inside = leaf.clone()
    value = OF_ONE[name](inside)
    with torch.no_grad():
        inside.zero_()
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], truth)


@pytest.mark.cpu_only(reason="the copy is not changed")
def test_gradients_that_wait_for_their_weights_notice_a_change():
    for function in (info_nce, nt_xent):
        leaf = randn(4, 4, seed=1).requires_grad_()
        inside = leaf.clone()
        losses = function(inside, inside, 0.5, "none")
        with torch.no_grad():
            inside.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses.sum().backward()


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("name", OF_ONE)
def test_tensor_subclasses(name):
    rows = randn(4, 4, seed=1)
    truth = OF_ONE[name](rows)
    tagged = OF_ONE[name](rows.clone().as_subclass(Tagged))
    assert torch.equal(tagged.detach().as_subclass(torch.Tensor), truth)
    parameter = OF_ONE[name](torch.nn.Parameter(rows.clone()))
    if name in (
        "linear_cka_to_kernel",
        "linear_cka_pairwise",
    ):  # the reference serves its gradient
        torch.testing.assert_close(parameter.detach(), truth, rtol=1e-12, atol=0)
    else:
        assert torch.equal(parameter.detach(), truth)
    with torch.inference_mode():
        assert torch.equal(OF_ONE[name](rows.clone()), truth)
    conjugate = torch.complex(torch.zeros_like(rows), -rows).conj().imag  # its sign is a flag, not in memory
    assert conjugate.is_neg()
    torch.testing.assert_close(OF_ONE[name](conjugate), truth)


# ---- derivatives of derivatives -----------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", [info_nce, nt_xent])
def test_second_derivatives_are_refused(function, reduction):
    query, key = randn(4, 3, seed=1).requires_grad_(), randn(4, 3, seed=2).requires_grad_()
    loss = function(query, key, 0.5, reduction).sum()
    grads = torch.autograd.grad(loss, [query, key], create_graph=True)
    message = f"the compiled {function.__name__} has no second derivative"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(grads[0].square().sum() + grads[1].sum(), query)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.functional.hessian(lambda q: function(q, key, 0.5, reduction).sum(), query)


@pytest.mark.usefixtures("native")
def test_second_derivatives_of_cka_are_refused():
    x, y = randn(4, 3, seed=1).requires_grad_(), randn(4, 2, seed=2).requires_grad_()
    kernel = (y @ y.T).detach()
    for name, function in (
        ("linear_cka", linear_cka),
        ("linear_cka_to_kernel", lambda x, _: linear_cka_to_kernel(x, kernel)),
    ):
        grad = torch.autograd.grad(function(x, y), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=f"the compiled {name} has no second derivative"):
            torch.autograd.grad(grad.square().sum(), x)


def test_the_reference_has_second_derivatives(monkeypatch):
    monkeypatch.setattr(native, "module", None)
    tensors = randn(3, 2, seed=1).requires_grad_(), randn(3, 2, seed=2).requires_grad_()
    for function in (info_nce, nt_xent):
        assert torch.autograd.gradgradcheck(lambda p, q, f=function: f(p, q, 0.5), tensors)
    assert torch.autograd.gradgradcheck(linear_cka, tensors)
