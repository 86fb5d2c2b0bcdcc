"""What stands in docstrings is shown as it is written."""

import ast
import re

import pytest

from website.repository_files import ROOT

DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
RESULTS = re.compile(r"^ *(?:Returns|Yields):\n *(.+)$", re.MULTILINE)
FILES = [path for package in ("fedkernels", "fedssl") for path in sorted((ROOT / package).rglob("*.py"))]


def results_shown_as_types(source):
    """First lines of the sections "Returns" and "Yields" with a colon: what is before it is shown as a type."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    docstrings = (ast.get_docstring(node) or "" for node in nodes)
    return [line for docstring in docstrings for line in RESULTS.findall(docstring) if ":" in line]


@pytest.mark.parametrize("package", ["fedkernels", "fedssl"])
def test_no_result_is_shown_as_a_type(package):
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == package]
    assert len(files) > 20
    found = {path.relative_to(ROOT).as_posix(): results_shown_as_types(path.read_text("utf-8")) for path in files}
    assert not {name: lines for name, lines in found.items() if lines}


def test_such_a_result_is_found():
    source = 'def f():\n    """Add.\n\n    Returns:\n        {}\n    """\n'
    assert results_shown_as_types(source.format('A scalar, or [B] for "none": float64.')) != []
    assert results_shown_as_types(source.format('A scalar, or [B] for "none"; float64.')) == []
