"""Each measured figure of a page has its source in its section: a committed result or the command."""

from __future__ import annotations

import re

import pytest

from website.repository_files import ROOT

#: what marks a figure that was measured: a spread, an accuracy, a rate, a time, a ratio of speeds
MEASURED = re.compile(r"±|\d\.\d %|images/s|\d (?:ms|s)\b|\d times as fast|points (?:above|below)")
#: a link to a result, a page of results, a command, or the words that a figure without a file must have
SOURCE = re.compile(
    r"benchmarks/results|`python -m |demo\.md|`make demo`|fedssl run-table|by hand|speed\.md|<!-- generated"
)
#: its seconds are settings
SETTINGS = ("deploy.md", "A reverse proxy in front of the SuperLink")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def sections(page):
    """The title and the text of each section of a page, without its code and equations."""
    text = re.sub(r"^```.*?^```$|\$\$.*?\$\$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^    .*$|\$[^$\n]*\$", "", text, flags=re.MULTILINE)
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return zip(parts[1::2], parts[2::2], strict=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_section_with_measured_figures_names_their_source(page):
    without = [
        title
        for title, text in sections(page)
        if MEASURED.search(text) and not SOURCE.search(text) and (page.name, title) != SETTINGS
    ]
    assert not without, f"{page.name}: link to the result in benchmarks/results, or name the command, in {without}"
