"""Faults that only the orders of the emulation can show: removed barriers, and scratch that problems share."""

import pytest
import torch

from tests.cuda_on_cpu import test_unbalanced_ot
from tests.cuda_on_cpu.emulation import EmulationError

FOUND = (AssertionError, EmulationError)
TEAM = "unbalanced_ot_team.cu"


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


CHECKS = {
    TEAM: check_team,
    "unbalanced_ot_block.cu": check_block,
}
FAULTS = {
    "a team, the turn of two buffers": (TEAM, "turn ^= 1;", ""),
    "a team, the last wait": (TEAM, "    solver.wait();  // its memory is the next problem's\n", ""),
    "a team, memory of its own": (TEAM, "memory + team * size.words(t)", "memory"),
    "a block, the point's memory": ("unbalanced_ot_block.cu", "points + problem * memory.point()", "points"),
    "a block, the plan's memory": ("unbalanced_ot_block.cu", "rests + problem * memory.rest()", "rests"),
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
