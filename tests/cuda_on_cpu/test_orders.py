"""Faults that only the orders of the emulation can show: removed barriers, and scratch that problems share."""

import mmap
import sys

import pytest
import torch

from fedkernels.reference.apply_deltas import apply_deltas
from tests.cuda_on_cpu import (
    test_apply_deltas,
    test_client_weights,
    test_delta_gram,
    test_linear_cka,
    test_unbalanced_ot,
)
from tests.cuda_on_cpu.emulation import ROOT, SANITIZED, EmulationError, arrays, integers, planted, poison
from tests.fedkernels.test_client_weights import gram_of

CUDA = ROOT / "csrc/cuda"
FOUND = (AssertionError, EmulationError)
TEAM = "unbalanced_ot_team.cu"


def check_linear_cka(library):
    x, y = test_linear_cka.pair(1, 70, 30, 20)  # three chunks of rows: the last lies in the buffer of the first
    test_linear_cka.check(test_linear_cka.run(library, x, y), x, y)


def check_team(library):
    given = test_unbalanced_ot.problem(3, 20, 30, dtype=torch.float32)
    options = (0.8, 0.9, 1e-3, 40)
    for multiprocessors in (1, 3):  # one team for three problems, and two teams
        solved = test_unbalanced_ot.solve_by(library, "team", *given, *options, multiprocessors=multiprocessors)
        test_unbalanced_ot.check(solved, *given, *options)


def check_block(library):
    given, options = test_unbalanced_ot.problem(2, 100, 97), (0.8, 0.9, 1e-4, 20)
    solved = test_unbalanced_ot.solve_by(library, "block", *given, *options, shared_limit=48 << 10)
    test_unbalanced_ot.check(solved, *given, *options)


def check_client_weights(library):
    grams = torch.stack([gram_of(101, 300, 0.3, seed) for seed in range(2)])
    weights = test_client_weights.solve(library, grams, shared_limit=test_client_weights.SMALL)
    for gram, of_gram in zip(grams, weights, strict=True):
        test_client_weights.assert_optimal(gram, of_gram)


CHECKS = {
    "linear_cka.cu": check_linear_cka,
    TEAM: check_team,
    "unbalanced_ot_block.cu": check_block,
    "client_weights.cu": check_client_weights,
}
FAULTS = {
    "linear_cka, the tile before has been multiplied": (
        "linear_cka.cu",
        "  __syncthreads();  // the tile before has been multiplied\n",
        "",
    ),
    "a team, the turn of two buffers": (TEAM, "turn ^= 1;", ""),
    "a team, the last wait": (TEAM, "    solver.wait();  // its memory is the next problem's\n", ""),
    "a team, memory of its own": (TEAM, "memory + team * size.words(t)", "memory"),
    "a block, the point's memory": ("unbalanced_ot_block.cu", "points + problem * memory.point()", "points"),
    "a block, the plan's memory": ("unbalanced_ot_block.cu", "rests + problem * memory.rest()", "rests"),
    "client_weights, the matrix's memory": ("client_weights.cu", "matrices + problem * entries", "matrices"),
}


@pytest.mark.parametrize("source", CHECKS)
def test_without_a_fault_nothing_is_found(compiler, source):
    CHECKS[source](compiler.load(source))


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(compiler, name):
    source, old, new = FAULTS[name]
    with pytest.raises(FOUND):
        CHECKS[source](compiler.mutant(source, old, new))


# ---- sizes that no test reaches: the constants are compiled small ----


def check_apply_deltas(library):
    start, client = torch.randn(2, 4 * 1024 + 7, generator=torch.Generator().manual_seed(0))
    (updated,) = test_apply_deltas.run(library, [start], [[client]], torch.tensor([0.5]).double())
    wanted = [start.clone()]
    apply_deltas(wanted, [[client]], torch.tensor([0.5]).double())
    assert torch.equal(updated, wanted[0])


def test_apply_deltas_goes_on_where_the_grid_ends(compiler):
    """A grid has at most 65,536 blocks, for 67 million entries; here it has two, for five chunks."""
    constant, small = "MOST_BLOCKS = 1 << 16", "MOST_BLOCKS = 2"
    check_apply_deltas(compiler.mutant("apply_deltas.cu", constant, small))
    text = planted(CUDA / "apply_deltas.cu", constant, small)
    faulty = text.replace("index += gridDim.x", "index += lists.chunks")
    assert faulty != text
    with pytest.raises(FOUND):
        check_apply_deltas(compiler.compile(faulty, "apply_deltas"))


def check_delta_gram(library):
    start, client = torch.randn(2, 34 * 1536, generator=torch.Generator().manual_seed(0))
    gram = test_delta_gram.run(library, [start], [[client]], multiprocessors=20)
    wanted = (start.double() - client.double()).square().sum()
    torch.testing.assert_close(gram.squeeze(), wanted, rtol=1e-6, atol=0)


def test_delta_gram_adds_the_33rd_block(compiler):
    check_delta_gram(compiler.load("delta_gram.cu"))
    with pytest.raises(FOUND):
        check_delta_gram(compiler.mutant("delta_gram.cu", "block < blocks; block += 32", "block < 32; block += 32"))


# ---- entries beyond 2^31, of which the last alone are looked at: the emulation would take hours for all ----

BEYOND = 2**31 + 1500


@pytest.fixture
def long_versions():
    """Two of a tensor whose entries are 0 but for the last 1,500: memory that nobody writes does not exist."""
    if SANITIZED or sys.platform != "linux":
        pytest.skip("memory that is not reserved is Linux's, and AddressSanitizer has its own")
    nowhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    versions = [torch.frombuffer(mmap.mmap(-1, 4 * BEYOND, flags=nowhere), dtype=torch.float32) for _ in range(2)]
    for version, values in zip(versions, torch.randn(2, 1500, generator=torch.Generator().manual_seed(0)), strict=True):
        version[-1500:] = values
    return versions


def of_the_last_chunks(compiler, source, pairs, beyond_31_bits=True):
    """The kernel, with two blocks that begin with the last two chunks, and each of which does nothing more."""
    text = (CUDA / source).read_text(encoding="utf-8")
    if not beyond_31_bits:
        start = "start = (index - first_chunk[low]) * chunk,"
        header = planted(CUDA / "parameter_lists.h", start, f"{start[:-1]} & 0x7fffffff,").replace("#pragma once", "")
        pairs = [*pairs, ('#include "cuda/parameter_lists.h"\n', header)]
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return compiler.compile(text, source.removesuffix(".cu"))


@pytest.mark.parametrize("beyond_31_bits", [True, False])
def test_apply_deltas_beyond_31_bits(compiler, long_versions, beyond_31_bits):
    pairs = [
        ("MOST_BLOCKS = 1 << 16", "MOST_BLOCKS = 2"),
        ("index = blockIdx.x;", "index = lists.chunks - 1 - blockIdx.x;"),
    ]
    library = of_the_last_chunks(compiler, "apply_deltas.cu", pairs, beyond_31_bits)
    wanted, weights = [long_versions[0][-1500:].clone()], torch.tensor([0.5]).double()
    apply_deltas(wanted, [[long_versions[1][-1500:]]], weights)
    library.settings(0, False, 1, 227 << 10)
    words = poison(2 * 2 + 4 + 1, dtype=torch.int64)
    library.call("cuda_apply_deltas", arrays(long_versions), integers([BEYOND]), 1, 1, weights, None, words, None)
    assert torch.equal(long_versions[0][-1500:], wanted[0]) == beyond_31_bits


@pytest.mark.parametrize("beyond_31_bits", [True, False])
def test_delta_gram_beyond_31_bits(compiler, long_versions, beyond_31_bits):
    pairs = [
        ("static_cast<int>(blockIdx.x), 0, 0, MIXED", "static_cast<int>(lists.chunks - 1 - blockIdx.x), 0, 0, MIXED")
    ]
    library = of_the_last_chunks(compiler, "delta_gram.cu", pairs, beyond_31_bits)
    library.settings(0, False, 1, 227 << 10)
    words = poison(library.ask("cuda_delta_gram_words", 1, 1), dtype=torch.int64)
    gram = poison(1, 1)
    library.call("cuda_delta_gram", arrays(long_versions), integers([BEYOND]), 1, 1, words, gram, None)
    wanted = (long_versions[0][-1500:].double() - long_versions[1][-1500:].double()).square().sum()
    assert torch.allclose(gram.squeeze(), wanted, rtol=1e-6) == beyond_31_bits
