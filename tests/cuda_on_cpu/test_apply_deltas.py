"""csrc/cuda/apply_deltas.cu against the reference, to the last bit."""

import pytest
import torch

from fedkernels.reference.apply_deltas import apply_deltas
from tests.cuda_on_cpu.emulation import arrays, integers, poison

SHAPES = [(4, 3, 3), (5,), (), (2, 0), (1023,), (1024,), (3, 701)]
ANY = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def model(seed, dtypes, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtypes[index % len(dtypes)]) for index, tensor in enumerate(tensors)]


def run(library, start, clients, weights):
    def step(call):
        target = [tensor.clone() for tensor in start]
        versions = [version[t] for t in range(len(start)) for version in (target, *clients)]
        words = poison(2 * len(versions) + 3 * len(start) + 1 + len(clients), dtype=torch.int64)
        sizes = integers([tensor.numel() for tensor in start])
        call("cuda_apply_deltas", arrays(versions), sizes, len(start), len(clients), weights, words, None)
        return target

    return library.results(step)


@pytest.mark.parametrize(
    ("clients", "dtypes"),
    [
        (1, ANY[:1]),
        (3, ANY[1:2]),
        (5, ANY[2:3]),
        (2, ANY[3:]),
        (40, ANY[:1]),
        (4, ANY),
    ],
)
def test_equals_the_reference(compiler, clients, dtypes):
    start = model(0, dtypes)
    params = [model(1 + k, dtypes) for k in range(clients)]
    weights = torch.linspace(-0.3, 0.7, clients, dtype=torch.float64)
    truth = [tensor.clone() for tensor in start]
    apply_deltas(truth, params, weights)
    found = run(compiler.load("apply_deltas.cu"), start, params, weights)
    assert all(torch.equal(x, y) for x, y in zip(truth, found, strict=True))


def test_dtypes_may_differ_between_versions_of_a_tensor(compiler):
    start, params = model(0, ANY), [model(k, ANY[k:] + ANY[:k]) for k in range(1, 4)]
    weights = torch.tensor([0.2, 0.5, 0.1]).double()
    truth = [tensor.clone() for tensor in start]
    apply_deltas(truth, params, weights)
    found = run(compiler.load("apply_deltas.cu"), start, params, weights)
    assert all(torch.equal(x, y) for x, y in zip(truth, found, strict=True))


def test_views_that_start_anywhere(compiler):
    """Neighbours that do not lie at a multiple of their size are read one by one."""
    base = [torch.arange(50.0), torch.arange(60.0) * 1.5]
    start, params = [base[0][1:40]], [[base[1][3:42]], [base[1][16:55]]]
    weights = torch.tensor([0.25, 0.5]).double()
    truth = [start[0].clone()]
    apply_deltas(truth, params, weights)
    library = compiler.load("apply_deltas.cu")
    words = poison(2 * 3 + 4 + 2, dtype=torch.int64)
    versions = arrays([start[0], params[0][0], params[1][0]])
    library.call("cuda_apply_deltas", versions, integers([39]), 1, 2, weights, words, None)
    assert torch.equal(start[0], truth[0])
    assert base[0][0] == 0
    assert torch.equal(base[0][40:], torch.arange(40.0, 50.0))
