"""The comments of csrc/cpu that describe a fault still stand above the line that they change."""

import pytest

from tests.mutants import copied_tree
from tests.mutants.copied_tree import ROOT
from tests.mutants.kernels import faults, planted

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_its_line_and_has_its_tests(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert planted(fault, text) != text
    assert (ROOT / fault.tests).is_file()


def test_a_source_with_another_name_leaves_the_copy(tmp_path, monkeypatch):
    """Both would be compiled."""
    for name, value in {"ROOT": tmp_path / "tree", "COPY": tmp_path / "copy", "COPIED": ("csrc",)}.items():
        monkeypatch.setattr(copied_tree, name, value)
    source = tmp_path / "tree" / "csrc" / "one.cpp"
    source.parent.mkdir(parents=True)
    source.touch()
    copied_tree.copy_sources()
    source.rename(source.with_name("two.cpp"))
    copied_tree.copy_sources()
    assert [path.name for path in (tmp_path / "copy" / "csrc").iterdir()] == ["two.cpp"]


def test_every_kernel_has_one():
    kernels = {path.name for path in (ROOT / "csrc" / "cpu").glob("*.cpp")}
    assert kernels - {fault.file.rpartition("/")[2] for fault in FAULTS} <= {
        "linear_cka.cpp",
        "view_parameters.cpp",
    }  # their headers have
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
