"""The compiled operators as torch sees them: opcheck, threads and forks, writes in place."""

import pytest
import torch

import fedkernels
from fedkernels.internal import native
from fedkernels.reference.similarity_logsumexp import similarity_logsumexp as reference


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def similarity_problem(queries, keys):
    numbers, more = torch.arange(queries), torch.arange(keys)
    excluded = numbers[:, None] % 7 == more % 5
    return randn(queries, 20), randn(keys, 20, seed=1), numbers % keys, numbers % 9, more % 8, excluded, True


def problems():
    """Arguments of every compiled operator."""
    params, clients = [randn(40, 50), randn(7)], [randn(40, 50, seed=1), randn(7, seed=1)]
    deltas = randn(9, 30)
    images = (100 * randn(9, 3, 12, 17).abs()).clamp(0, 255).to(torch.uint8)
    cost, masses = randn(3, 20, 17).abs(), torch.ones(3, 20).double()
    sums = [torch.zeros(width, width).double() for width in (20, 9)]
    return {
        "add_products": (randn(37, 29), [20, 9], 1, torch.zeros(20, 9).double(), sums),
        "apply_deltas": ([t.clone() for t in params], clients, torch.tensor([0.5]).double()),
        "client_weights": (deltas @ deltas.T, 1e-8),
        "delta_gram": (params, clients + [t + 1 for t in clients]),
        "info_nce": (randn(37, 20), randn(50, 20, seed=1), 0.3, "mean", True, True),
        "debiased_cka": (randn(2, 37, 20), randn(37, 50, seed=1), True, True),
        "debiased_cka_pairwise": ([randn(37, 20), randn(37, 9, seed=1)], [randn(37, 50, seed=2)]),
        "hsic_pairwise": ([randn(37, 20), randn(37, 9, seed=1)], [randn(37, 50, seed=2)]),
        "linear_cka": (randn(2, 37, 20), randn(37, 50, seed=1), True, True, True),
        "linear_cka_pairwise": ([randn(37, 20), randn(37, 9, seed=1)], [randn(37, 50, seed=2)], True),
        "linear_cka_to_kernel": (randn(2, 37, 20), randn(37, 37, seed=1), True, True),
        "nt_xent": (randn(37, 20), randn(37, 20, seed=1), 0.3, "sum", True),
        "sigmoid_loss": (randn(37, 20), randn(37, 20, seed=1), True, True),
        "similarity_logsumexp": similarity_problem(37, 50),
        "two_views": (images, torch.arange(9), 1, 2, 3, 4, fedkernels.ViewOptions().numbers(), False, True),
        "unbalanced_ot": (cost, masses, masses[:, :17].contiguous(), 0.8, 0.9, 1e-4, 1000, "accelerated"),
    }


def test_every_compiled_operator_is_tried_here():
    assert set(problems()) == set(native.COMPILED)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", native.COMPILED)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.fedkernels, name).default, problems()[name])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True), (True, True)])
def test_opcheck_of_the_sums_of_all_pairs(wanted):
    operators, utilities = torch.ops.fedkernels, ("test_schema", "test_autograd_registration", "test_faketensor")
    query, key = randn(37, 20).requires_grad_(wanted[0]), randn(37, 20, seed=1).requires_grad_(wanted[1])
    missing = [torch.empty(0)] * 4
    for options in (missing, [torch.arange(37), *missing[:3]]):
        for columns in (False, True):
            arguments = query, key, *options, columns
            torch.library.opcheck(operators.similarity_logsumexp.default, arguments, test_utils=utilities)
    torch.library.opcheck(operators.sigmoid_loss.default, (query, key, *wanted), test_utils=utilities)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_opcheck_of_the_contrastive_losses(reduction, wanted):
    """Which gradients come with the losses depends on the reduction, and so do the shapes of what is returned."""
    operators, utilities = torch.ops.fedkernels, ("test_schema", "test_autograd_registration", "test_faketensor")
    query, key = randn(37, 20).requires_grad_(wanted[0]), randn(50, 20, seed=1).requires_grad_(wanted[1])
    torch.library.opcheck(operators.info_nce.default, (query, key, 0.3, reduction, *wanted), test_utils=utilities)
    views = query, key.detach()[:37].clone().requires_grad_(wanted[1])
    torch.library.opcheck(operators.nt_xent.default, (*views, 0.3, reduction, any(wanted)), test_utils=utilities)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("samples", [7, 40])  # in sample space, in feature space
def test_opcheck_of_linear_cka(samples, wanted):
    operators, utilities = torch.ops.fedkernels, ("test_schema", "test_autograd_registration", "test_faketensor")
    x, y = randn(3, 1, samples, 5).requires_grad_(wanted[0]), randn(2, samples, 9, seed=1).requires_grad_(wanted[1])
    torch.library.opcheck(operators.linear_cka.default, (x, y, False, *wanted), test_utils=utilities)
    kernel = (y @ y.mT).detach()
    torch.library.opcheck(operators.linear_cka_to_kernel.default, (x, kernel, True, wanted[0]), test_utils=utilities)
    torch.library.opcheck(operators.debiased_cka.default, (x, y, *wanted), test_utils=utilities)


def similarities():
    """Calls of the operators of CKA that take each way through their products, large enough to be shared by threads."""
    few, many = [randn(300, width, seed=width) for width in (170, 200, 90)], randn(2100, 90)
    kernel = many @ many.T
    operators = torch.ops.fedkernels
    return {
        "debiased, samples": lambda: operators.debiased_cka(few[0], few[1], True, True),
        "debiased, features": lambda: operators.debiased_cka(many, many[:, :70].exp(), True, True),
        "debiased pairs": lambda: operators.debiased_cka_pairwise(few, []),
        "hsic, samples": lambda: operators.hsic_pairwise(few[:2], few[2:]),
        "hsic, features": lambda: operators.hsic_pairwise([many], [many[:, :40].exp()]),
        "samples": lambda: operators.linear_cka(few[0], few[1], True, True, True),
        "features": lambda: operators.linear_cka(many, many[:, :70].exp(), True, True, True),
        "kernel, samples": lambda: operators.linear_cka_to_kernel(few[0], kernel[:300, :300].contiguous(), True, True),
        "kernel, features": lambda: operators.linear_cka_to_kernel(many, kernel, True, True),
        "pairs, samples": lambda: operators.linear_cka_pairwise(few, [], True),
        "pairs, features": lambda: operators.linear_cka_pairwise([many, many[:, :3].exp()], [many[:, :40].exp()], True),
    }


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", similarities())
def test_threads_agree_on_similarities_to_the_last_bit(name):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            result = similarities()[name]()
            results.append([result] if isinstance(result, torch.Tensor) else result)
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


def similarity_gradients(queries, keys):
    query, key, positives, *labels, excluded, _ = similarity_problem(queries, keys)
    problem = query, key, positives, *labels, excluded
    rows, columns, _ = reference(query, key, positives, tuple(labels), excluded)
    weights = [torch.linspace(-0.5, 1.5, count).double() for count in (queries, keys, queries)]
    return *problem, rows, columns, *weights, True, True


def gradients_by_weights():
    """Arguments of the operators that form the gradients once the weights of the losses are known."""
    rows, weights = randn(900, 20), torch.linspace(-0.5, 1.5, 1400).double()
    return {
        "info_nce_gradients": (randn(700, 20, seed=1), rows, 0.3, weights[:700].clone(), True, True),
        "similarity_logsumexp_gradients": similarity_gradients(700, 900),
        "nt_xent_gradients": (randn(700, 20, seed=1), rows[:700].clone(), 0.3, weights),
    }


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", gradients_by_weights())
def test_gradients_by_weights(name):
    operator, arguments = getattr(torch.ops.fedkernels, name).default, gradients_by_weights()[name]
    torch.library.opcheck(operator, arguments)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            result = operator(*arguments)
            results.append([result] if isinstance(result, torch.Tensor) else result)
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", native.COMPILED)
def test_threads_agree_to_the_last_bit(name):
    before, results = torch.get_num_threads(), []
    large = [randn(700, 90), randn(11)]
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            if name == "apply_deltas":
                arguments = ([t.clone() for t in large], [t + 1 for t in large], torch.tensor([0.3]).double())
            elif name == "delta_gram":
                arguments = (large, [*(t + 1 for t in large), *(t - 2 * t.abs() for t in large)])
            elif name == "unbalanced_ot":  # one problem, large enough to be shared by threads
                masses = torch.ones(370).double()
                arguments = (randn(370, 370).abs(), masses, masses, 0.8, 0.9, 1e-3, 1000, "accelerated")
            elif name == "info_nce":  # several groups of queries and blocks of keys
                arguments = (randn(700, 20), randn(900, 20, seed=1), 0.3, "mean", True, True)
            elif name == "add_products":  # several blocks of rows and pieces of columns
                sums = [torch.zeros(width, width).double() for width in (300, 170)]
                arguments = (randn(500, 470), [300, 170], 1, torch.zeros(300, 170).double(), sums)
            elif name == "sigmoid_loss":
                arguments = (randn(1100, 20), randn(1100, 20, seed=1), True, True)
            elif name == "similarity_logsumexp":
                arguments = similarity_problem(700, 900)
            elif name == "nt_xent":
                arguments = (randn(700, 20), randn(700, 20, seed=1), 0.3, "mean", True)
            else:
                arguments = problems()[name]
            result = getattr(torch.ops.fedkernels, name)(*arguments)
            result = arguments[0] if result is None else result
            written = [arguments[3], *arguments[4]] if name == "add_products" else []
            results.append([*written, *([result] if isinstance(result, torch.Tensor) else result)])
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


class Transport(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return fedkernels.unbalanced_ot(randn(4, 20, 20, seed=index).abs(), 1.0, 1.0, 0.8, 0.8)


def test_forked_workers():
    """A child must not wait for threads that only its parent has."""
    here = [Transport()[index] for index in range(4)]
    there = torch.utils.data.DataLoader(Transport(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(x, y) for x, y in zip(here, there, strict=True))


@pytest.mark.usefixtures("native")
def test_in_place_writes_are_seen_by_autograd():
    weight = torch.nn.Parameter(randn(3))
    loss = weight.square().sum()
    fedkernels.apply_deltas([weight], [[randn(3, seed=1)]], [1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("native")
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
