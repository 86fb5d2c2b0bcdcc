"""The measured figures of an operator, from benchmarks/results/cpu."""

from __future__ import annotations

import posixpath
import re

from website.repository_files import FOLDER, ROOT


def table(operator: str, page: str) -> str:
    """Markdown: the operator's section of each processor's results, with a link to the whole file.

    Raises:
        ValueError: no processor's results have the operator.
    """
    sections = []
    for path in sorted((ROOT / "benchmarks" / "results" / "cpu").glob("*/results.md")):
        text = path.read_text(encoding="utf-8")
        section = re.search(rf"^## {operator}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        if section is None:
            continue
        # The last column of the file's tables has no name, which a reader of the page by ear would miss.
        named = re.sub(r"^(\| size \|.*\|)  \|$", r"\1 remark |", section[1].strip(), flags=re.MULTILINE)
        target = f"{FOLDER}/{path.relative_to(ROOT).as_posix()}"
        link = posixpath.relpath(target, posixpath.dirname(page))
        sections.append(
            f"### On {path.parent.name}\n\n{named}\n\nWritten by `python -m benchmarks {operator}`; "
            f"[the whole file]({link}) says how to read it."
        )
    if not sections:
        raise ValueError(f"{page} asks for the figures of {operator}, but benchmarks/results/cpu has none")
    return "\n\n".join(sections)
