"""Every public function under autocast, torch.compile and torch.func, thread counts, forked workers, forward mode."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses import FakeTensor, FakeTensorMode

import fedkernels
from fedkernels import (
    apply_deltas,
    client_weights,
    clip_loss,
    debiased_cka,
    debiased_cka_pairwise,
    delta_gram,
    info_nce,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    nt_xent,
    sigmoid_loss,
    supervised_contrastive_loss,
    unbalanced_ot,
    unbalanced_ot_plan,
)

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def applied(start, *clients):
    start = start.detach().clone()
    apply_deltas([start], [[client] for client in clients], [0.3, 0.9])
    return start


def gram(clients, entries):
    deltas = randn(clients, entries)
    return (deltas @ deltas.T).round(decimals=1)  # which bfloat16 leaves definite


ROWS, MORE = (randn(rows, 20, seed=rows).to(BF16).to(FP64) for rows in (37, 300))  # the same in every dtype
COST, MASSES = randn(2, 30, 20, seed=3).abs(), 0.5 + randn(30, seed=4).abs()
X, Y, WIDE = randn(3, 40, 7, seed=5), randn(3, 40, 50, seed=6), randn(40, 90, seed=7)


def classes(rows, count=37):
    return torch.arange(count, device=rows.device) % 5


# name: function of tensors, these tensors
DIFFERENTIABLE = {
    "info_nce": (lambda q, k: info_nce(q, k, 0.3), [ROWS, MORE]),
    "info_nce, query alone": (lambda q: info_nce(q, MORE.to(q), 0.3, "sum"), [ROWS]),
    "info_nce, key alone": (lambda k: info_nce(ROWS.to(k), k, 0.3), [MORE]),
    "info_nce, not reduced": (lambda q, k: info_nce(q, k, 0.3, "none"), [ROWS, MORE]),
    "nt_xent": (lambda p, q: nt_xent(p, q, 0.3), [ROWS, MORE[:37]]),
    "nt_xent, one view": (lambda p: nt_xent(p, MORE[:37].to(p), 0.3, "sum"), [ROWS]),
    "nt_xent, not reduced": (lambda p, q: nt_xent(p, q, 0.3, "none"), [ROWS, MORE[:37]]),
    "info_nce, pairs left out": (
        lambda q, k, n: info_nce(q, k, 0.3, positives=classes(q), negatives=n, labels=(classes(q), classes(q, 60))),
        [ROWS, MORE[:37], MORE[37:60]],
    ),
    "clip_loss": (lambda p, q: clip_loss(p, q, 0.7), [ROWS, MORE[:37]]),
    "supervised_contrastive_loss": (lambda p: supervised_contrastive_loss(p, classes(p), 2.0), [ROWS]),
    "supervised_contrastive_loss, even": (lambda p: supervised_contrastive_loss(p, classes(p, 36), 2.0), [ROWS[:36]]),
    "sigmoid_loss": (lambda p, q: sigmoid_loss(p, q, 0.7, -2.0), [ROWS, MORE[:37]]),
    "debiased_cka": (lambda x, y: debiased_cka(x, y), [X, Y]),
    "debiased_cka_pairwise": (lambda x, y, z: debiased_cka_pairwise([x, y], [z]), [X[0], Y[0], WIDE]),
    "linear_cka": (lambda x, y: linear_cka(x, y), [X, Y]),
    "linear_cka, centered": (lambda x, y: linear_cka(x, y, centered=True), [X, WIDE]),
    "linear_cka_to_kernel": (lambda x, k: linear_cka_to_kernel(x, k), [X, WIDE @ WIDE.T]),
    "linear_cka_pairwise": (lambda x, y, z: linear_cka_pairwise([x, y], [z]), [X[0], Y[0], WIDE]),
    "unbalanced_ot": (lambda cost, a: unbalanced_ot(cost, a, 1.0, 0.8, 0.9, tol=1e-6), [COST, MASSES]),
}
DETACHED = {
    "unbalanced_ot_plan": (lambda cost, a: unbalanced_ot_plan(cost, a, 1.0, 0.8, 0.9)[0], [COST, MASSES]),
    "client_weights": (lambda g: client_weights(g), [gram(9, 90)]),
    "delta_gram": (lambda start, p, q: delta_gram([start], [[p], [q]]), [ROWS, ROWS + 1, -ROWS]),
    "apply_deltas": (applied, [ROWS, ROWS + 1, -ROWS]),
}
ALL = DIFFERENTIABLE | DETACHED


def result(function, tensors, dtype=FP64, autocast=None):
    """The value, and the gradients of its sum where there are any."""
    leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        value = function(*leaves)
    grads = torch.autograd.grad(value.sum(), leaves) if value.requires_grad else ()
    return [value.detach(), *grads]


def assert_same(some, others):
    assert len(some) == len(others)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(some, others, strict=True))


@pytest.mark.cpu_only(reason="nothing is computed")
def test_every_public_function_is_tried_here():
    tried = {name.partition(",")[0] for name in ALL}
    others = {"TransportInfo", "build_info", "self_test"}
    others |= {"CKAAccumulator", "Comparison", "MinibatchCKA", "compare"}  # test_accumulate_cka.py and its neighbours
    others |= {"ViewKey", "ViewOptions", "ViewParameters", "two_views", "view_parameters"}  # test_two_views.py
    assert tried == set(fedkernels.__all__) - others
    assert all(result(*DIFFERENTIABLE[name])[1:] for name in DIFFERENTIABLE)
    assert not any(result(*DETACHED[name])[1:] for name in DETACHED)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_autocast_changes_nothing(name, dtype):
    """Nothing is cast: neither float64 and float32 to half precision, nor the sums of half precision."""
    function, tensors = ALL[name]
    outside = result(function, tensors, dtype)
    for narrow in (BF16, FP16):
        assert_same(result(function, tensors, dtype, narrow), outside)
    if name == "delta_gram":
        assert outside[0].dtype == FP64
    elif name == "apply_deltas":
        assert outside[0].dtype == dtype
    else:
        assert outside[0].dtype == (FP64 if dtype == FP64 else FP32)
    assert all(grad.dtype == dtype for grad in outside[1:])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_narrow_inputs_are_summed_wide(name, dtype):
    """The value is that of the same inputs in float64, but for the rounding of float32."""
    function, tensors = ALL[name]
    narrow = [tensor.to(dtype) for tensor in tensors]
    value, truth = result(function, narrow, dtype)[0], result(function, narrow)[0]
    rounding = 2 * torch.finfo(value.dtype).eps if name == "apply_deltas" else 1e-5
    torch.testing.assert_close(value.double(), truth, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(name, dynamic):
    function, tensors = ALL[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for value, truth in zip(result(compiled, tensors), result(function, tensors), strict=True):
        torch.testing.assert_close(value, truth)


@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "linear_cka"])
def test_one_compiled_graph_serves_many_sizes(name):
    function, tensors = ALL[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, columns in [(37, 20), (21, 13), (5, 17)]:
        smaller = [tensor[:rows, :columns].contiguous() for tensor in tensors]
        with torch.compiler.set_stance("fail_on_recompile" if rows < 37 else "default"):
            values = result(compiled, smaller)
        for value, truth in zip(values, result(function, smaller), strict=True):
            torch.testing.assert_close(value, truth)


@pytest.mark.cpu_only(reason="threads of the CPU")
@pytest.mark.parametrize("name", ALL)
def test_thread_counts_agree(name):
    function, tensors = ALL[name]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(result(function, tensors))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        for value, other in zip(results[0], others, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-12, atol=1e-12)


class Everything(torch.utils.data.Dataset):
    def __len__(self):
        return len(ALL)

    def __getitem__(self, index):
        return result(*list(ALL.values())[index])


@pytest.mark.cpu_only(reason="CUDA does not outlive a fork")
def test_forked_workers():
    """A child must not wait for threads that only its parent has."""
    # In a process of its own: one whose backward pass has once used autograd's threads cannot fork, with any operator.
    code = "from tests.fedkernels.test_contexts import compare_with_forked; compare_with_forked()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def compare_with_forked():
    torch.set_num_threads(2)
    here = [Everything()[index] for index in range(len(ALL))]
    there = list(
        torch.utils.data.DataLoader(
            Everything(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120
        )
    )
    for name, values, others in zip(ALL, here, there, strict=True):
        for value, other in zip(values, others, strict=True):
            torch.testing.assert_close(
                value, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "unbalanced_ot"])
def test_forward_mode_is_not_dropped(name):
    """Its derivative along v is that of the backward pass times v."""
    function, tensors = DIFFERENTIABLE[name]
    along = [randn(*tensor.shape, seed=9) for tensor in tensors]
    truth = sum((grad * v).sum() for grad, v in zip(result(function, tensors)[1:], along, strict=True))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(tensor, v) for tensor, v in zip(tensors, along, strict=True)]
        tangent = forward_ad.unpack_dual(function(*duals)).tangent
    torch.testing.assert_close(tangent.sum(), truth)
    _, tangent = torch.func.jvp(function, tuple(tensors), tuple(along))
    torch.testing.assert_close(tangent.sum(), truth)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_of_torch_func(name):
    """Those of one argument, alone and mapped over a batch of it, are what a loop of backward passes gives."""
    function, (first, *rest) = DIFFERENTIABLE[name]
    batch = torch.stack([first, first.flip(0), 1.5 * first])

    def total(tensor):
        return function(tensor, *rest).sum()

    of_each = torch.func.grad(total)
    truth = [result(total, [one]) for one in batch]
    torch.testing.assert_close(of_each(first), truth[0][1])
    torch.testing.assert_close(torch.func.vmap(total)(batch), torch.stack([value for value, _ in truth]))
    torch.testing.assert_close(torch.func.vmap(of_each)(batch), torch.stack([grad for _, grad in truth]))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_compile_without_a_graph_break(name):
    function, (first, *rest) = DIFFERENTIABLE[name]
    of_one = torch.func.grad(lambda tensor: function(tensor, *rest).sum())
    torch.compiler.reset()
    compiled = torch.compile(of_one, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(first), of_one(first), rtol=1e-3, atol=1e-3)


def test_weights_of_clients_map_over_a_batch():
    grams = torch.stack([gram(9, 90), gram(9, 30)])
    assert torch.equal(torch.func.vmap(client_weights)(grams), client_weights(grams))


@pytest.mark.parametrize("name", ALL)
def test_tensors_without_numbers(name):
    """Of the meta device and fake ones: shape and dtype come out, and nothing is computed."""
    function, tensors = ALL[name]
    truth = function(*tensors)
    found = function(*(tensor.to("meta") for tensor in tensors))
    assert found.is_meta
    assert (found.shape, found.dtype) == (truth.shape, truth.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = function(*(mode.from_tensor(tensor) for tensor in tensors))
    assert isinstance(found, FakeTensor)
    assert (found.shape, found.dtype) == (truth.shape, truth.dtype)


def test_a_transform_maps_what_is_not_batched():
    """A batch of masses for one cost, and the batch in the last dimension."""
    masses = torch.stack([MASSES, 2 * MASSES], 1)
    found = torch.func.vmap(lambda a: unbalanced_ot(COST[0], a, 1.0, 0.8, 0.9), in_dims=1)(masses)
    torch.testing.assert_close(found, unbalanced_ot(COST[0].expand(2, 30, 20), masses.T, 1.0, 0.8, 0.9))


def test_a_second_derivative_of_a_transport_problem_is_refused():
    """And not taken for zero, in whichever input and by whichever way; what the value is multiplied by has one."""
    cost, masses = COST[0].clone().requires_grad_(), MASSES.clone().requires_grad_()

    def solve(cost, masses):
        return unbalanced_ot(cost, masses, 1.0, 0.8, 0.9)

    for one, other in ((cost, cost), (cost, masses), (masses, cost)):
        (grad,) = torch.autograd.grad(solve(cost, masses), one, create_graph=True)
        with pytest.raises(RuntimeError, match="unbalanced_ot has no second derivative"):
            torch.autograd.grad(grad.square().sum() + other.sum(), other)
    for number in (0, 1):
        alone = torch.func.grad(solve, number)
        for grad, arguments in ((alone, (COST[0], MASSES)), (torch.func.vmap(alone), (COST[:1], MASSES[None]))):
            for other in (0, 1):
                with pytest.raises(RuntimeError, match="unbalanced_ot has no second derivative"):
                    torch.func.grad(lambda *given, grad=grad: grad(*given).square().sum(), other)(*arguments)
    factor = torch.tensor(2.0, dtype=FP64, requires_grad=True)
    (grad,) = torch.autograd.grad(factor * solve(cost, masses), cost, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(grad.sum(), factor)[0], grad.sum() / factor)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name.startswith(("info_nce", "nt_xent"))])
def test_several_gradients_at_once(name, dtype):
    function, tensors = DIFFERENTIABLE[name]
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    value = function(*leaves)
    along = torch.stack([torch.ones_like(value), torch.full_like(value, -2)])
    found = torch.autograd.grad(value, leaves, along, is_grads_batched=True, retain_graph=True)
    for grads, one in zip(found, torch.autograd.grad(value, leaves, along[0]), strict=True):
        torch.testing.assert_close(grads, torch.stack([one, -2 * one]))


def test_a_transport_problem_refuses_forward_mode():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        unbalanced_ot(forward_ad.make_dual(COST, COST), 1.0, 1.0, 0.8, 0.9)


@pytest.mark.parametrize("module", ["InfoNCE", "NTXent"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("temperature", [0.1, 2.0])
def test_modules_of_the_contrastive_losses(module, reduction, temperature):
    function, rows = {"InfoNCE": (info_nce, MORE), "NTXent": (nt_xent, MORE[:37])}[module]
    loss = getattr(fedkernels.nn, module)(temperature, reduction)
    assert_same(result(loss, [ROWS, rows]), result(lambda p, q: function(p, q, temperature, reduction), [ROWS, rows]))
    assert torch.equal(getattr(fedkernels.nn, module)(temperature)(ROWS, rows), function(ROWS, rows, temperature))
    assert repr(loss) == f"{module}(temperature={temperature}, reduction='{reduction}')"


@pytest.mark.parametrize("centered", [False, True])
def test_module_of_cka(centered):
    loss = fedkernels.nn.CKALoss(centered)
    assert_same(result(loss, [X, Y]), result(lambda x, y: 1 - linear_cka(x, y, centered).mean(), [X, Y]))
    assert torch.equal(fedkernels.nn.CKALoss()(X, Y), fedkernels.nn.CKALoss(False)(X, Y))
    assert repr(loss) == f"CKALoss(centered={centered})"


MODULES = {
    "InfoNCE": (fedkernels.nn.InfoNCE(0.2), [ROWS, MORE]),
    "NTXent": (fedkernels.nn.NTXent(0.2), [ROWS, MORE[:37]]),
    "SupervisedContrastiveLoss": (fedkernels.nn.SupervisedContrastiveLoss(0.2), [ROWS, classes(ROWS)]),
    "CLIPLoss": (fedkernels.nn.CLIPLoss(), [ROWS, MORE[:37], 0.7]),
    "SigmoidLoss": (fedkernels.nn.SigmoidLoss(), [ROWS, MORE[:37], 0.7, -2.0]),
    "CKALoss": (fedkernels.nn.CKALoss(), [X, Y]),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_move_and_store_like_any_other(name):
    module, inputs = MODULES[name]
    assert not list(module.parameters())
    assert not module.state_dict()
    torch.compiler.reset()
    compiled = torch.compile(module.to(FP64), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), module(*inputs))
