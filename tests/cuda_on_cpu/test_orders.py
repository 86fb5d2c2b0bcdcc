"""Faults that only the orders of the emulation can show: removed barriers, and scratch that problems share."""

import pytest
import torch

from tests.cuda_on_cpu import test_unbalanced_ot
from tests.cuda_on_cpu.emulation import EmulationError

FOUND = (AssertionError, EmulationError)
TRANSPORT = "unbalanced_ot.cu"


def check_teams(library):
    given = test_unbalanced_ot.problem(3, 20, 130, dtype=torch.float32)
    options = (0.8, 0.9, 1e-3, 40)
    for multiprocessors in (1, 3):  # one team for three problems, and two teams
        solved = test_unbalanced_ot.solve_by(library, *given, *options, multiprocessors=multiprocessors)
        test_unbalanced_ot.check(solved, *given, *options)


def check_blocks(library):
    given, options = test_unbalanced_ot.problem(2, 100, 97), (0.8, 0.9, 1e-4, 20)
    solved = test_unbalanced_ot.solve_by(library, *given, *options, shared_limit=48 << 10)
    test_unbalanced_ot.check(solved, *given, *options)


OWN_MEMORY = "memory + team * (layout.end() - layout.in_shared)"
FAULTS = {
    "a team, the turn of two buffers": (check_teams, "turn ^= 1;", ""),
    "a team, the last wait": (check_teams, "    solver.wait();  // its memory is the next problem's\n", ""),
    "a team, memory of its own": (check_teams, OWN_MEMORY, "memory"),
    "a block, memory of its own": (check_blocks, OWN_MEMORY, "memory"),
}


@pytest.mark.parametrize("check", [check_teams, check_blocks])
def test_without_a_fault_nothing_is_found(compiler, check):
    check(compiler.load(TRANSPORT))


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(compiler, name):
    check, old, new = FAULTS[name]
    with pytest.raises(FOUND):
        check(compiler.mutant(TRANSPORT, old, new))
