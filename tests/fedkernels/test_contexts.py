"""Every path of the table under torch.compile, torch.export, autocast and torch.func, in threads and forked workers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.export import Dim, export

import fedkernels
from fedkernels import client_weights, info_nce, linear_cka, unbalanced_ot
from tests.fedkernels.conftest import by_reference
from tests.fedkernels.inputs import FP64, gram, pairs, problem, problems
from tests.fedkernels.operators import DIFFERENTIABLE, OPERATORS, OTHERS, PATHS, value_and_gradients

ROOT = Path(__file__).resolve().parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = 37, 20, 23, 3
OF_FLOATS = [name for name, path in PATHS.items() if path.inputs(1, 1, 0, 0)[0].is_floating_point()]
# One path of each function, whose reference is one. Of pairs it serves the gradients, whose graph is compiled anyway.
PLAIN = [name for name in {name.partition(",")[0]: name for name in reversed(PATHS)}.values() if "pairwise" not in name]
# Paths whose graph is that of another path with another number in it, or a part of one.
IN_OTHER_GRAPHS = {
    *("clip_loss", "sigmoid_loss", "info_nce, recompute", "nt_xent, temperature", "linear_cka_to_kernel"),
    *("linear_cka_pairwise, with itself", "debiased_cka_pairwise, with itself", "unbalanced_ot", "unbalanced_ot_plan"),
    *(name for name in PATHS if name.startswith(("unbalanced_ot, interior", "unbalanced_ot, steepest"))),
}
OF_GRAPHS = [name for name in PATHS if name not in {"view_parameters", *IN_OTHER_GRAPHS}]  # the former has no operator


def result(name: str, dtype: torch.dtype = FP64, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    path = PATHS[name]
    return value_and_gradients(path.call, path.leaves(path.inputs(*sizes), dtype))


def assert_same(some, others):
    assert len(some) == len(others)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(some, others, strict=True))


def test_everything_public_is_in_the_table():
    assert {*OPERATORS, *OTHERS} == set(fedkernels.__all__)
    assert not {*OPERATORS} & {*OTHERS}
    assert {type(module).__name__ for module in MODULES} == set(fedkernels.nn.__all__)
    for name, path in PATHS.items():
        learned = [x for x in path.leaves(path.inputs(5, 4, 2, 1)) if x.requires_grad]
        assert len(result(name, sizes=(5, 4, 2, 1))) == 1 + len(learned)


@pytest.mark.parametrize("name", OF_GRAPHS)
def test_one_compiled_graph_serves_all_sizes(name):
    """Where the reference forms the gradients, whose graph is large, one of fixed sizes."""
    path = PATHS[name]
    torch.compiler.reset()
    compiled = torch.compile(path.call, fullgraph=True, dynamic=not path.by_reference, backend="aot_eager")
    for sizes in (SIZES, (21, 13, 9, 1))[: 1 if path.by_reference else 2]:
        leaves = path.leaves(path.inputs(*sizes))
        with torch.compiler.set_stance("default" if sizes is SIZES else "fail_on_recompile"):
            found = value_and_gradients(compiled, leaves)
        torch.testing.assert_close(found, value_and_gradients(path.call, leaves))


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "two_views"])
def test_references_compile_without_a_graph_break(name):
    """Which torch.func's transforms take, too."""
    path = PATHS[name]
    first, *rest = path.inputs(9, 6, 4, 1)
    function = path.call
    if path.learns(0, first):
        function = torch.func.grad(lambda tensor, *others: path.call(tensor, *others).sum())
    torch.compiler.reset()
    with by_reference():
        found = torch.compile(function, fullgraph=True, backend="aot_eager")(first, *rest)
        torch.testing.assert_close(found, function(first, *rest))


class Program(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def assert_exports(function, inputs, strict=False):
    """For batches of 4 to 64 samples: odd and even ones, with fewer rows than columns and with more."""
    batch = Dim("batch", min=4, max=64)
    tensors = inputs(11)
    rows = 12 if 12 in tensors[0].shape else 11  # of an even number
    shapes = tuple({place: batch for place, size in enumerate(x.shape) if size == rows} for x in tensors)
    program = export(Program(function), tuple(tensors), dynamic_shapes=(shapes,), strict=strict).module()
    for n in (4, 7, 16):
        torch.testing.assert_close(program(*inputs(n)), function(*inputs(n)))


DECIDED_BY_SIZE = ["debiased_cka", "linear_cka", "supervised_contrastive_loss, even"]


@pytest.mark.cpu_only(reason="the program is that of the CPU")
@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in OF_GRAPHS), *((name, True) for name in DECIDED_BY_SIZE)]
)
def test_an_exported_program_serves_batches_of_other_sizes(name, strict):
    assert_exports(PATHS[name].call, lambda n: PATHS[name].inputs(n, 5, 0, n), strict)


@pytest.mark.cpu_only(reason="the program is that of the CPU")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name == "two_views" else ())
        for name in PLAIN
        if name != "view_parameters"  # of which two_views has the whole
    ],
)
def test_references_export(name):
    with by_reference():
        assert_exports(PATHS[name].call, lambda n: PATHS[name].inputs(n, 5, 0, n))


@pytest.mark.parametrize("name", OF_FLOATS)
def test_autocast_changes_nothing_and_narrow_inputs_are_summed_wide(name):
    """Nothing is cast: neither float64 and float32 to half precision, nor the sums of half precision."""
    path = PATHS[name]
    for dtype in (BF16, FP16, FP32, FP64):
        leaves = path.leaves(path.inputs(*SIZES), dtype)
        outside = value_and_gradients(path.call, leaves)
        wide = FP64 if dtype == FP64 or name == "delta_gram" else FP32
        assert outside[0].dtype == (dtype if name == "apply_deltas" else wide)
        assert all(gradient.dtype == dtype for gradient in outside[1:])
        truth = path.call(*(x.detach().double() if x.is_floating_point() else x for x in leaves))
        rounding = 2 * torch.finfo(outside[0].dtype).eps if name == "apply_deltas" else 1e-5
        torch.testing.assert_close(outside[0].double(), truth, rtol=rounding, atol=1e-5)
        for narrow in (BF16, FP16):
            with torch.autocast("cpu", narrow):
                value = path.call(*leaves)
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            gradients = torch.autograd.grad(value.sum(), asked) if asked else ()
            assert_same([value.detach(), *gradients], outside)


class Everything(torch.utils.data.Dataset):
    def __len__(self):
        return len(PATHS)

    def __getitem__(self, index):
        return result(list(PATHS)[index], sizes=(9, 20, 3, 1))


@pytest.mark.cpu_only(reason="CUDA does not outlive a fork")
def test_forked_workers():
    """A child must not wait for threads that only its parent has."""
    # In a process of its own: one whose backward pass has once used autograd's threads cannot fork, with any operator.
    code = "from tests.fedkernels.test_contexts import compare_with_forked; compare_with_forked()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def compare_with_forked():
    torch.set_num_threads(2)
    here = [Everything()[index] for index in range(len(PATHS))]
    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "fork", "timeout": 120}
    for name, values, others in zip(PATHS, here, torch.utils.data.DataLoader(Everything(), **options), strict=True):
        for value, other in zip(values, others, strict=True):
            assert torch.allclose(value, other, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if not PATHS[name].no_forward_mode])
def test_forward_mode_is_not_dropped(name):
    """Its derivative along v is that of the backward pass times v; compiled too, also after a call without one."""
    path = PATHS[name]
    leaves = path.leaves(path.inputs(*SIZES))
    along = [torch.sin(torch.arange(x.numel())).view(x.shape).double() for x in leaves]
    gradients = iter(value_and_gradients(path.call, leaves)[1:])
    truth = sum((next(gradients) * v).sum() for x, v in zip(leaves, along, strict=True) if x.requires_grad)
    calls = [path.call]
    if name in PLAIN:
        torch.compiler.reset()
        calls.append(torch.compile(path.call, backend="aot_eager"))
        calls[1](*(x.detach() for x in leaves))
    with forward_ad.dual_level():
        pairs_of = zip(leaves, along, strict=True)
        duals = [forward_ad.make_dual(x.detach(), v) if x.requires_grad else x for x, v in pairs_of]
        tangents = [forward_ad.unpack_dual(call(*duals)).tangent for call in calls]
    for tangent in tangents:
        torch.testing.assert_close(tangent.sum(), truth)
    learned = sum(x.requires_grad for x in leaves)  # which come first

    def of_learned(*tensors):
        return path.call(*tensors, *leaves[learned:])

    primals = tuple(x.detach() for x in leaves[:learned])
    _, tangent = torch.func.jvp(of_learned, primals, tuple(along[:learned]))
    torch.testing.assert_close(tangent.sum(), truth)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_of_torch_func(name):
    """Those of one argument, alone and mapped over a batch of it, are what a loop of backward passes gives."""
    path = PATHS[name]
    first, *rest = path.inputs(9, 6, 4, 1)
    batch = torch.stack([first, first.flip(0), 1.5 * first])

    def total(tensor):
        return path.call(tensor, *rest).sum()

    of_each = torch.func.grad(total)
    truth = [value_and_gradients(total, [one.clone().requires_grad_()]) for one in batch]
    torch.testing.assert_close(of_each(first), truth[0][1])
    torch.testing.assert_close(torch.func.vmap(total)(batch), torch.stack([value for value, _ in truth]))
    torch.testing.assert_close(torch.func.vmap(of_each)(batch), torch.stack([gradient for _, gradient in truth]))


def test_weights_of_clients_map_over_a_batch():
    grams = torch.stack([*gram(9, 0, 0, 1), *gram(9, 0, 0, 2)])
    assert torch.equal(torch.func.vmap(client_weights)(grams), client_weights(grams))


def test_a_transform_maps_what_is_not_batched():
    """A batch of masses for one cost, and the batch in the last dimension."""
    cost, a, b = problem(30, 20, 0, 1)
    masses = torch.stack([a, 0.5 * a], 1)
    found = torch.func.vmap(lambda a: unbalanced_ot(cost, a, b, 0.8, 0.9), in_dims=1)(masses)
    torch.testing.assert_close(found, unbalanced_ot(cost.expand(2, 30, 20), masses.T, b, 0.8, 0.9))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["info_nce", "info_nce, not reduced", "nt_xent", "nt_xent, not reduced"])
def test_several_gradients_at_once(name, dtype):
    path = PATHS[name]
    leaves = path.leaves(path.inputs(*SIZES), dtype)
    value = path.call(*leaves)
    along = torch.stack([torch.ones_like(value), torch.full_like(value, -2)])
    found = torch.autograd.grad(value, leaves, along, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(value, leaves, along[0])
    torch.testing.assert_close(found, tuple(torch.stack([one, -2 * one]) for one in alone))


def test_a_transport_problem_refuses_forward_mode():
    cost = problems(6, 5, 0, 1)[0]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        unbalanced_ot(forward_ad.make_dual(cost, cost), 1.0, 1.0, 0.8, 0.9)


@pytest.mark.parametrize("name", PATHS)
def test_tensors_without_numbers(name):
    """Shape and dtype come out, and nothing is computed. Of fake ones opcheck and compiled graphs tell the same."""
    path = PATHS[name]
    inputs = path.inputs(*SIZES)
    truth = path.call(*inputs)
    found = path.call(*(tensor.to("meta") for tensor in inputs))
    assert found.is_meta
    assert (found.shape, found.dtype) == (truth.shape, truth.dtype)


NN, SCALE, BIAS = fedkernels.nn, torch.tensor(2.0), torch.tensor(-1.0)


ROWS = pairs(11, 5, 0, 1)
# module: the function of the same tensors, and these
MODULES = {
    NN.InfoNCE(0.2, "sum"): (lambda q, k: info_nce(q, k, 0.2, "sum"), ROWS),
    NN.NTXent(2.0, "none"): (lambda p, q: fedkernels.nt_xent(p, q, 2.0, "none"), ROWS),
    NN.SupervisedContrastiveLoss(0.5, "sum"): (
        lambda z, labels: fedkernels.supervised_contrastive_loss(z, labels, 0.5, "sum"),
        [ROWS[0], torch.arange(11) % 3],
    ),
    NN.CLIPLoss(): (lambda *given: fedkernels.clip_loss(*given), [*ROWS, SCALE]),
    NN.SigmoidLoss("sum"): (lambda *given: fedkernels.sigmoid_loss(*given, "sum"), [*ROWS, SCALE, BIAS]),
    NN.CKALoss(True): (lambda x, y: 1 - linear_cka(x, y, True).mean(), ROWS),
}


@pytest.mark.cpu_only(reason="they only call functions")
@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_modules_are_their_functions(module):
    """To the last bit; they hold no state."""
    function, given = MODULES[module]
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given]
    assert_same(value_and_gradients(module, leaves), value_and_gradients(function, leaves))
    assert not [*module.parameters(), *module.state_dict()]


def test_a_module_learns_its_temperature():
    temperature = torch.nn.Parameter(torch.tensor(0.5))
    module = NN.InfoNCE(temperature)
    assert list(module.parameters()) == [temperature]
    assert torch.autograd.grad(module(*ROWS), temperature)[0] != 0
