"""Each code block of "Use it in ..." runs as it stands, without the library that it replaces."""

from __future__ import annotations

import re
import sys

import pytest

from website.repository_files import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use_it_in.md").read_text(encoding="utf-8"), re.DOTALL)
ORIGINALS = ("open_clip", "lightly", "pytorch_metric_learning", "sentence_transformers", "torchjd", "torch_cka", "ot")


def test_there_is_a_block_for_each_library():
    assert len(BLOCKS) == len(ORIGINALS) + 1


@pytest.mark.parametrize("number", range(len(ORIGINALS) + 1))
def test_a_block_runs(number, monkeypatch):
    for name in ORIGINALS:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises ImportError
    exec(BLOCKS[number], {"__name__": "block"})
