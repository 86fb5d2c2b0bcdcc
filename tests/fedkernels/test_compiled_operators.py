"""The compiled operators as torch sees them: opcheck, threads to the last bit."""

import pytest
import torch

import fedkernels
from fedkernels.internal import contrastive_cuda, native
from fedkernels.reference.similarity_logsumexp import similarity_logsumexp as reference
from tests.fedkernels.inputs import images, mask_of, problem, randn

pytestmark = pytest.mark.usefixtures("native")
WANTED = [(False, False), (True, False), (False, True), (True, True)]
RULES = "test_schema", "test_autograd_registration", "test_faketensor"  # test_aot_dispatch_dynamic takes longest
MISSING = torch.empty(0)


def operator(name):
    return getattr(torch.ops.fedkernels, name).default


def similarities(queries, keys):
    query, key, numbers = randn(queries, 20), randn(keys, 20, seed=1), torch.arange(max(queries, keys))
    return query, key, numbers[:queries] % keys, numbers[:queries] % 9, numbers[:keys] % 8, mask_of(query, key), True


def similarity_gradients(queries, keys):
    *given, _ = similarities(queries, keys)
    query, key, positives, *labels, excluded = given
    rows, columns, _ = reference(query, key, positives, tuple(labels), excluded)
    weights = [torch.linspace(-0.5, 1.5, count).double() for count in (queries, keys, queries)]
    return *given, rows, columns, *weights, True, True


def problems(n):
    """What makes the arguments of every operator: n = 37 is one block, 700 are several that threads share."""
    rows, more, weights = randn(n, 20), randn(n + 13, 20, seed=1), torch.linspace(-0.5, 1.5, 2 * n).double()
    x, y, z = randn(n, 170), randn(n, 200, seed=1).exp(), randn(n, 9, seed=2)
    start, clients = [randn(n, 50), randn(7)], [randn(n, 50, seed=1), randn(7, seed=1)]
    cost, a, b = problem(n // 2, n // 2 + 3, 0, 1)
    sums = [torch.zeros(width, width).double() for width in (n // 2, 9)]
    deltas = randn(min(n, 90), 10 * n)
    gram, kernel = deltas @ deltas.T, y @ y.T  # once, as torch may round products otherwise with other threads
    batch = x.expand(2, n, 170).contiguous()
    return {
        "add_products": lambda: (randn(n, n // 2 + 9), [n // 2, 9], 1, torch.zeros(n // 2, 9).double(), sums),
        "apply_deltas": lambda: (start, clients, torch.tensor([0.5]).double()),
        "client_weights": lambda: (gram, 1e-8),
        "debiased_cka": lambda: (batch, y, True, True),
        "debiased_cka_pairwise": lambda: ([x, z], [y]),
        "delta_gram": lambda: (start, clients + [one + 1 for one in clients]),
        "hsic_pairwise": lambda: ([x, z], [y]),
        "info_nce": lambda: (rows, more, 0.3, "mean", True, True),
        "info_nce_gradients": lambda: (rows, more, 0.3, weights[:n].clone(), True, True),
        "linear_cka": lambda: (batch, y, True, True, True),
        "linear_cka_pairwise": lambda: ([x, z], [y], True),
        "linear_cka_to_kernel": lambda: (batch, kernel, True, True),
        "nt_xent": lambda: (rows, more[:n].clone(), 0.3, "sum", True),
        "nt_xent_gradients": lambda: (rows, more[:n].clone(), 0.3, weights),
        "sigmoid_loss": lambda: (rows, more[:n].clone(), True, True),
        "similarity_logsumexp": lambda: similarities(n, n + 13),
        "similarity_logsumexp_gradients": lambda: similarity_gradients(n, n + 13),
        "two_views": lambda: (*images(n, 0, 0, 1), 1, 2, 3, 4, fedkernels.ViewOptions().numbers(), False, True),
        "unbalanced_ot": lambda: (cost, a, b, 0.8, 0.9, 1e-4, 1000, "accelerated"),
    }


SMALL = problems(37)
OF_REFERENCES = {  # which torch.compile calls, for their loops end depending on the data
    "client_weights_solve": SMALL["client_weights"],
    "unbalanced_ot_reference": SMALL["unbalanced_ot"],
}
OF_RANKS = {"distributed_losses", "distributed_gradients"}  # distributed/test_operator.py
OF_CUDA = {*native.PARTS, *native.CONTRASTIVE_PARTS, *contrastive_cuda.SCHEMAS}  # tests/cuda_on_cpu


def test_every_registered_operator_is_tried_here():
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "fedkernels::" in name}
    names = {name.partition(".")[0] for name in registered}
    assert names - OF_RANKS == {*SMALL, *OF_REFERENCES, *OF_CUDA}
    assert {*native.SCHEMAS, *contrastive_cuda.SCHEMAS} == {*SMALL, *OF_CUDA}


@pytest.mark.parametrize("name", [*SMALL, *OF_REFERENCES])
def test_opcheck(name):
    torch.library.opcheck(operator(name), (SMALL | OF_REFERENCES)[name]())


@pytest.mark.parametrize("method", ["interior_point", "steepest"])
@pytest.mark.parametrize("name", ["unbalanced_ot", "unbalanced_ot_reference"])
def test_opcheck_of_other_methods(name, method):
    cost, a, b = problem(5, 7, 0, 1)
    torch.library.opcheck(operator(name), (cost, a, b, 90.0, 80.0, 1e-6, 100, method), test_utils=RULES)


@pytest.mark.parametrize("wanted", WANTED)
def test_opcheck_of_each_option(wanted):
    """Which gradients come with a value depends on what is wanted and on the reduction, and so do their shapes.

    Of views the dtype and the strides do.
    """
    query, key = randn(9, 20).requires_grad_(wanted[0]), randn(13, 20, seed=1).requires_grad_(wanted[1])
    views = query, key.detach()[:9].clone().requires_grad_(wanted[1])
    calls = [
        *(("info_nce", (query, key, 0.3, reduction, *wanted)) for reduction in ("mean", "sum", "none")),
        *(("nt_xent", (*views, 0.3, reduction, any(wanted))) for reduction in ("mean", "sum", "none")),
        ("sigmoid_loss", (*views, *wanted)),
        # in bfloat16 and channels last
        ("two_views", (*images(3, 0, 0, 1), 1, 2, 3, 4, fedkernels.ViewOptions().numbers(), *wanted)),
    ]
    for options in (4 * [MISSING], [torch.arange(9), *3 * [MISSING]]):
        calls += [("similarity_logsumexp", (query, key, *options, columns)) for columns in (False, True)]
    for samples in (7, 40):  # in sample space, in feature space
        x, y = randn(3, 1, samples, 5).requires_grad_(wanted[0]), randn(2, samples, 9).requires_grad_(wanted[1])
        kernel = (y @ y.mT).detach()
        calls.append(("linear_cka", (x, y, False, *wanted)))
        calls.append(("linear_cka_to_kernel", (x, kernel, True, wanted[0])))
        calls.append(("debiased_cka", (x, y, *wanted)))
    for name, arguments in calls:
        torch.library.opcheck(operator(name), arguments, test_utils=RULES)


@pytest.mark.parametrize("name", SMALL)
def test_threads_agree_to_the_last_bit(name):
    before, results = torch.get_num_threads(), []
    try:
        for n in (300, 1100) if "cka" in name or "hsic" in name else (700,):  # in sample space, in feature space
            made = problems(n)
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                arguments = made[name]()
                result = operator(name)(*arguments)
                written = [arguments[3], *arguments[4]] if name == "add_products" else []
                written += arguments[0] if name == "apply_deltas" else []
                results.append([*written, *([result] if isinstance(result, torch.Tensor) else result or [])])
            assert all(torch.equal(x, y) for others in results[1:] for x, y in zip(results[0], others, strict=True))
            results.clear()
    finally:
        torch.set_num_threads(before)


def test_subnormal_halves_count_where_the_processor_flushes():
    """A half below 6.1e-5 is no subnormal float32, and is read right where those are taken for 0."""
    halves = torch.arange(1, 0x7C00, 31, dtype=torch.int16).view(torch.float16)
    truth = halves.double().square()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        found = [fedkernels.delta_gram([torch.zeros_like(half)], [[half]]) for half in halves]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(torch.cat(found).flatten(), truth)
