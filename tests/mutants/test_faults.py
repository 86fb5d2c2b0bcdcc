"""The list of faults fits the sources; `make mutants` runs it."""

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.faults import FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_of_a_fault_occurs_once(fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.old != fault.new


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_of_a_fault_exist(fault):
    files = [argument for argument in fault.tests if argument.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_there_are_enough_faults_and_each_has_its_own_name():
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
