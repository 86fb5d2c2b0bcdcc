"""csrc/cuda/delta_gram.cu against the reference, which sums in float64."""

import pytest
import torch

from fedkernels.reference.delta_gram import delta_gram
from tests.cuda_on_cpu.emulation import arrays, integers, poison

SHAPES = [(4, 3, 3), (5,), (), (2, 0), (1537,)]
ANY = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def model(seed, dtypes, shapes=SHAPES, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtypes[index % len(dtypes)]) for index, tensor in enumerate(tensors)]


def run(library, start, clients, **device):
    versions = arrays([version[t] for t in range(len(start)) for version in (start, *clients)])
    sizes = integers([tensor.numel() for tensor in start])

    def gram(call):
        words = poison(library.ask("cuda_delta_gram_words", len(start), len(clients)), dtype=torch.int64)
        result = poison(len(clients), len(clients))
        call("cuda_delta_gram", versions, sizes, len(start), len(clients), words, result, None)
        return result

    return library.results(gram, **device)


def check(found, start, clients, tolerance):
    truth = delta_gram(start, clients)
    size = truth.diagonal().sqrt()
    assert ((found - truth).abs() <= tolerance * size[:, None] * size).all()
    assert torch.equal(found, found.T)


@pytest.mark.parametrize("clients", [1, 3, 8, 10, 13, 21, 33, 50, 73, 100])
def test_float32_to_1e_6(compiler, clients):
    start, params = model(0, ANY[:1]), [model(1 + k, ANY[:1]) for k in range(clients)]
    check(run(compiler.load("delta_gram.cu"), start, params), start, params, 2e-7)


@pytest.mark.parametrize("clients", [2, 12, 105, 145, 230])  # 105: many rows beside a single column
def test_float64_and_more_clients_than_a_panel(compiler, clients):
    shapes = SHAPES[:4] if clients > 100 else SHAPES
    start, params = model(0, ANY[1:2], shapes), [model(1 + k, ANY[1:2], shapes) for k in range(clients)]
    check(run(compiler.load("delta_gram.cu"), start, params), start, params, 1e-13)


@pytest.mark.parametrize("clients", [105, 145])
def test_float32_of_more_clients_than_a_panel(compiler, clients):
    start, params = model(0, ANY[:1], SHAPES[:4]), [model(1 + k, ANY[:1], SHAPES[:4]) for k in range(clients)]
    check(run(compiler.load("delta_gram.cu"), start, params), start, params, 2e-7)


@pytest.mark.parametrize("clients", [6, 40])  # the latter on the tensor cores
@pytest.mark.parametrize("dtypes", [ANY[2:3], ANY[3:], ANY])
def test_other_dtypes(compiler, dtypes, clients):
    start, params = model(0, dtypes), [model(1 + k, dtypes[k % 2 :] + dtypes[: k % 2]) for k in range(clients)]
    check(run(compiler.load("delta_gram.cu"), start, params), start, params, 2e-7)


def test_all_roundings_one_way(compiler):
    """Equal products are summed: nothing averages out."""
    start = [torch.zeros(20_000)]
    params = [[torch.full((20_000,), value)] for value in (0.1, 0.7, 1 / 3)]
    check(run(compiler.load("delta_gram.cu"), start, params, multiprocessors=1), start, params, 1e-6)


def test_all_roundings_one_way_on_the_tensor_cores(compiler):
    """Here sums are rounded to the nearest, where tensor cores may cut them off."""
    start = [torch.zeros(4000)]
    params = [[torch.full((4000,), 1 / (3 + k))] for k in range(33)]
    check(run(compiler.load("delta_gram.cu"), start, params, multiprocessors=1), start, params, 2e-6)


@pytest.mark.parametrize(("clients", "scale"), [(3, 1e-22), (3, 1e21), (33, 1e21)])
def test_out_of_the_range_of_float32(compiler, clients, scale):
    start, params = model(0, ANY[:1], scale=scale), [model(1 + k, ANY[:1], scale=scale) for k in range(clients)]
    check(run(compiler.load("delta_gram.cu"), start, params), start, params, 1e-13)


@pytest.mark.parametrize("clients", [3, 33])
def test_what_is_not_finite_stays_where_it_is(compiler, clients):
    start, params = model(0, ANY[:1]), [model(1 + k, ANY[:1]) for k in range(clients)]
    params[1][4][700] = torch.inf
    truth = delta_gram(start, params)
    found = run(compiler.load("delta_gram.cu"), start, params)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=0, equal_nan=True)
    assert found[0, 0].isfinite()
    assert found[1, 1].isinf()


def test_clients_that_did_not_move_and_empty_models(compiler):
    library = compiler.load("delta_gram.cu")
    start = model(0, ANY[:1])
    assert not run(library, start, [start, start]).any()
    assert not run(library, [torch.ones(0)], [[torch.ones(0)]] * 3).any()


def test_views_that_start_anywhere(compiler):
    base = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    start, params = [base[1:1500]], [[base[1502:3001]], [base[2003:3502]]]
    check(run(compiler.load("delta_gram.cu"), start, params), start, params, 2e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("clients", [10, 40])
def test_a_missing_barrier_is_found(compiler, clients):
    faulty = compiler.mutant("delta_gram.cu", "    __syncthreads();  // the tile before has been multiplied\n", "")
    start, params = model(0, ANY[:1]), [model(1 + k, ANY[:1]) for k in range(clients)]
    with pytest.raises(AssertionError):
        check(run(faulty, start, params), start, params, 2e-7)
