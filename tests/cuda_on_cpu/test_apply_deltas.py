"""csrc/cuda/apply_deltas.cu against the reference, to the last bit."""

import pytest
import torch

from fedkernels.reference.apply_deltas import apply_deltas
from tests.cuda_on_cpu.emulation import ROOT, EmulationError, arrays, integers, planted, poison

SHAPES = [(4, 3, 3), (5,), (), (2, 0), (1023,), (1024,), (3, 701)]
ANY = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def model(seed, dtypes, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtypes[index % len(dtypes)]) for index, tensor in enumerate(tensors)]


def run(library, start, clients, weights, weights_on_device=False):
    """As one call; fresh memory for the lists is poisoned."""
    places = (None, weights) if weights_on_device else (weights, None)

    def step(call):
        target = [tensor.clone() for tensor in start]
        versions = [version[t] for t in range(len(start)) for version in (target, *clients)]
        words = poison(2 * len(versions) + 3 * len(start) + 1 + len(clients), dtype=torch.int64)
        sizes = integers([tensor.numel() for tensor in start])
        call("cuda_apply_deltas", arrays(versions), sizes, len(start), len(clients), *places, words, None)
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
    library.call("cuda_apply_deltas", versions, integers([39]), 1, 2, weights, None, words, None)
    assert torch.equal(start[0], truth[0])
    assert base[0][0] == 0
    assert torch.equal(base[0][40:], torch.arange(40.0, 50.0))


def models(clients, dtypes=ANY):
    start = model(0, dtypes)
    return start, [model(1 + k, dtypes) for k in range(clients)], torch.linspace(-0.3, 0.7, clients).double()


def assert_equals_the_reference(library, start, params, weights, **options):
    truth = [tensor.clone() for tensor in start]
    apply_deltas(truth, params, weights)
    results = run(library, start, params, weights, **options)
    assert all(torch.equal(x, y) for x, y in zip(truth, results, strict=True))


def test_weights_that_lie_on_the_device(compiler):
    assert_equals_the_reference(compiler.load("apply_deltas.cu"), *models(9), weights_on_device=True)


@pytest.mark.parametrize("dtype", ANY)
def test_versions_of_a_tensor_that_start_at_different_distances_from_a_vector(compiler, dtype):
    """All versions aligned, the global one alone not, one client alone not."""
    for moved in (None, 0, 1, 6):
        generator = torch.Generator().manual_seed(0)
        versions = [torch.randn(1500, generator=generator).to(dtype)[n == moved :][:1400] for n in range(7)]
        start, params = versions[:1], [[version] for version in versions[1:]]
        library = compiler.load("apply_deltas.cu")
        truth, target = versions[0].clone(), versions[0]
        apply_deltas([truth], params, weights := torch.linspace(-0.3, 0.7, 6).double())
        words = poison(2 * 7 + 4 + 6, dtype=torch.int64)
        library.call("cuda_apply_deltas", arrays(versions), integers([1400]), 1, 6, weights, None, words, None)
        assert torch.equal(start[0], truth)
        assert target.data_ptr() % 16 == (dtype.itemsize % 16 if moved == 0 else 0)


@pytest.fixture(scope="module")
def with_small_arguments(compiler):
    """Compiled as before CUDA 12.1."""
    text = (ROOT / "csrc/cuda/apply_deltas.cu").read_text(encoding="utf-8")
    return compiler.compile("#define CUDA_ON_CPU_SMALL_ARGUMENTS\n" + text, "apply_deltas")


def test_lists_longer_than_one_kernel_s_arguments(compiler, with_small_arguments):
    """10,500 words: two launches and a part of a third, or 20 and a part."""
    start = [torch.full((2,), float(n)) for n in range(100)]
    params = [[torch.full((2,), float(n + k % 7)) for n in range(100)] for k in range(50)]
    weights = torch.linspace(-0.3, 0.7, 50).double()
    for library in (compiler.load("apply_deltas.cu"), with_small_arguments):
        assert_equals_the_reference(library, start, params, weights)


def test_arguments_have_a_limit(compiler):
    """The emulation refuses what CUDA refuses."""
    name = "WORDS_IN_LARGE_ARGUMENTS"
    header = planted(ROOT / "csrc/cuda/parameter_lists.h", f"{name} = 4088", f"{name} = 4096")
    include = '#include "cuda/parameter_lists.h"'
    kernel = planted(ROOT / "csrc/cuda/apply_deltas.cu", include, header.replace("#pragma once", ""))
    with pytest.raises(EmulationError, match="too many bytes of arguments"):
        assert_equals_the_reference(compiler.compile(kernel, "apply_deltas"), *models(2))
