"""Inputs and outputs that share memory, inputs that change before the backward pass, subclasses, second derivatives."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

from fedkernels import info_nce, linear_cka, linear_cka_to_kernel, nt_xent
from fedkernels.internal import contrastive_one_tile
from tests.fedkernels.conftest import by_reference, is_on_gpu
from tests.fedkernels.inputs import FP64, randn
from tests.fedkernels.operators import DIFFERENTIABLE, PATHS, value_and_gradients

pytestmark = pytest.mark.filterwarnings("ignore:the optimum transports nothing")
SIZES = 4, 4, 0, 1
OF_FLOATS = [name for name, path in PATHS.items() if path.inputs(*SIZES)[0].is_floating_point()]
MEMORY = torch.arange(24, dtype=FP64).sin()
OVERLAPPING = {
    "windows": MEMORY.as_strided((4, 4), (1, 1)),
    "one row": MEMORY[:4].expand(4, 4),
    "one column": MEMORY[:4, None].expand(4, 4),
    "one entry": MEMORY[1].expand(4, 4),
    "transposed": MEMORY[:16].view(4, 4).T,
    "reversed in steps": MEMORY.as_strided((4, 4), (1, 5), 2),
}


@pytest.mark.parametrize("name", OF_FLOATS)
def test_overlapping_input_is_read_as_if_it_did_not(name):
    """The first input, in a batch too, and each other that has its shape: all are views of one memory."""
    path, before = PATHS[name], MEMORY.clone()
    for view in OVERLAPPING.values():
        inputs = path.inputs(*SIZES)
        if 0 in path.symmetric:
            view = view[:1, :1].expand(4, 4)
        overlapping = [view.expand(x.shape) if x.shape[-2:] == (4, 4) else x for x in inputs]
        found = value_and_gradients(
            path.call, [x.detach().requires_grad_(path.learns(n, x)) for n, x in enumerate(overlapping)]
        )
        truth = value_and_gradients(path.call, path.leaves([x.contiguous() for x in overlapping]))
        torch.testing.assert_close(found, truth)
        assert torch.equal(MEMORY, before)


@pytest.mark.parametrize("name", PATHS)
def test_outputs_never_share_memory_with_inputs(name):
    path = PATHS[name]
    leaves = path.leaves(path.inputs(*SIZES))
    versions = [leaf._version for leaf in leaves]
    outputs = value_and_gradients(path.call, leaves)
    given, made = ({x.untyped_storage().data_ptr() for x in tensors} for tensors in (leaves, outputs))
    assert not given & made
    assert [leaf._version for leaf in leaves] == versions


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "plan" not in name])
def test_a_leaf_may_be_used_again(name):
    """Twice in one call, in two calls, and for two backward passes; two names for the same values are two inputs."""
    path = PATHS[name]
    inputs = path.inputs(*SIZES)
    leaf = inputs[0].clone().requires_grad_()
    same = [path.learns(number, x) and x.shape == leaf.shape for number, x in enumerate(inputs)]

    def total():
        return path.call(*(leaf if is_leaf else x for is_leaf, x in zip(same, inputs, strict=True))).sum()

    value = total()
    once = torch.autograd.grad(value, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(value, leaf, retain_graph=True)[0], once)
    value.backward()
    torch.testing.assert_close(leaf.grad, once, rtol=0, atol=0)
    (total() + total()).backward()
    torch.testing.assert_close(leaf.grad, 3 * once)
    apart = [leaf.detach().clone().requires_grad_() if is_leaf else x for is_leaf, x in zip(same, inputs, strict=True)]
    torch.testing.assert_close(sum(value_and_gradients(path.call, apart)[1:]), once)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "linear_cka", "sigmoid_loss", "debiased_cka"])
def test_gradients_formed_with_the_value_do_not_read_their_inputs_again(name):
    path = PATHS[name]
    leaves = path.leaves(path.inputs(*SIZES))
    inside = [leaf.clone() for leaf in leaves]
    value = path.call(*inside)
    with torch.no_grad():
        for tensor in inside:
            tensor.zero_()
    torch.testing.assert_close(list(torch.autograd.grad(value, leaves)), value_and_gradients(path.call, leaves)[1:])


@pytest.mark.cpu_only(reason="the copy is not changed")
@pytest.mark.parametrize("name", ["info_nce, not reduced", "info_nce, recompute", "nt_xent, not reduced", "clip_loss"])
def test_gradients_that_wait_for_their_weights_notice_a_change(name):
    path = PATHS[name]
    inside = [leaf.clone() for leaf in path.leaves(path.inputs(*SIZES))]
    value = path.call(*inside)
    with torch.no_grad():
        inside[1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("name", OF_FLOATS)
def test_tensor_subclasses(name):
    path = PATHS[name]
    inputs = path.inputs(*SIZES)
    truth = path.call(*inputs)
    tagged = path.call(*(x.clone().as_subclass(Tagged) for x in inputs))
    assert torch.equal(tagged.detach().as_subclass(torch.Tensor), truth)
    parameter = path.call(*(torch.nn.Parameter(x.clone()) if x.is_floating_point() else x for x in inputs))
    rounding = 1e-12 if "kernel" in name or path.by_reference else 0  # where the reference serves the gradient
    torch.testing.assert_close(parameter.detach(), truth, rtol=rounding, atol=0)
    with torch.inference_mode():
        assert torch.equal(path.call(*(x.clone() for x in inputs)), truth)
    # Their sign is a flag, not in memory.
    negative = [torch.complex(torch.zeros_like(x), -x).conj().imag for x in inputs]
    assert all(x.is_neg() for x in negative)
    torch.testing.assert_close(path.call(*negative), truth)


OF_REFERENCE = "sigmoid_loss, not reduced"  # which has second derivatives
OF_REFERENCE_ON_GPU = "debiased_cka", "debiased_cka, a batch", "linear_cka, a batch", "linear_cka_to_kernel, a batch"
FIRST_ONLY = [name for name in DIFFERENTIABLE if not PATHS[name].by_reference and name not in (OF_REFERENCE, "sigreg")]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", FIRST_ONLY)
def test_second_derivatives_are_refused(name, request):
    """And not taken for zero, in whichever two inputs."""
    if name in OF_REFERENCE_ON_GPU and is_on_gpu(request):
        pytest.skip("its reference serves there, which has them")
    path = PATHS[name]
    leaves = path.leaves(path.inputs(*SIZES))
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    for one in learned:
        (gradient,) = torch.autograd.grad(path.call(*leaves).sum(), one, create_graph=True)
        for other in learned:
            with pytest.raises(RuntimeError, match="has no second derivative"):
                torch.autograd.grad(gradient.square().sum() + other.sum(), other, retain_graph=True)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name.startswith("unbalanced_ot,")])
def test_second_derivatives_of_transport_are_refused_under_transforms(name):
    """Which take the references of the other operators."""
    path = PATHS[name]
    inputs = path.inputs(*SIZES)
    for number, other in itertools.product(range(3), repeat=2):
        gradient = torch.func.grad(lambda *given: path.call(*given).sum(), number)
        for of, arguments in ((gradient, inputs), (torch.func.vmap(gradient), [x[None] for x in inputs])):
            with pytest.raises(RuntimeError, match="unbalanced_ot has no second derivative"):
                torch.func.grad(lambda *given, of=of: of(*given).square().sum(), other)(*arguments)


def test_what_a_transport_problem_is_multiplied_by_has_a_second_derivative():
    path = PATHS["unbalanced_ot"]
    cost, *masses = path.leaves(path.inputs(*SIZES))
    factor = torch.tensor(2.0, dtype=FP64, requires_grad=True)
    (gradient,) = torch.autograd.grad(factor * path.call(cost, *masses), cost, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(gradient.sum(), factor)[0], gradient.sum() / factor)


def test_the_reference_has_second_derivatives():
    tensors = randn(3, 2, seed=1).requires_grad_(), randn(3, 2, seed=2).requires_grad_()
    with by_reference():
        for function in (lambda p, q: info_nce(p, q, 0.5), lambda p, q: nt_xent(p, q, 0.5), linear_cka):
            assert torch.autograd.gradgradcheck(function, tensors)
        assert torch.autograd.gradgradcheck(lambda x, y: linear_cka_to_kernel(x, y @ y.T), tensors)


@pytest.mark.cpu_only(reason="its operators are stand-ins")
def test_what_a_loss_of_one_tile_keeps_lives_as_long_as_its_graph(monkeypatch):
    """And without a graph it forms nothing to keep. Its operators are those of CUDA, in whose place are others here."""
    wanted, weights = [], []

    def one_tile(rows, keys, *others):
        wanted.append(others[-2])
        formed = torch.zeros(len(rows), len(keys))
        weights.append(weakref.ref(formed))
        return rows.new_tensor(1.0), torch.zeros(10), formed

    def finish(formed, *others):
        return torch.zeros(4, 3), torch.zeros(4, 3)

    operators = SimpleNamespace(contrastive_one_tile=one_tile, contrastive_finish=finish)
    monkeypatch.setattr(contrastive_one_tile, "_ops", operators)
    query, key = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3)
    loss = contrastive_one_tile.value(contrastive_one_tile.Loss("info_nce", divides=True), query, key, 0.1)
    loss.backward(retain_graph=True)
    assert weights[0]() is not None
    loss.backward()
    assert weights[0]() is None
    for create_graph in (False, True):
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            torch.autograd.grad(loss, query, create_graph=create_graph)
    with torch.no_grad():
        contrastive_one_tile.value(contrastive_one_tile.Loss("info_nce", divides=True), query, key, 0.1)
    assert wanted == [True, False]
