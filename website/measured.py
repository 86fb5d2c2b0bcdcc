"""The measured figures of an operator, from benchmarks/results/cpu and benchmarks/results/curves."""

from __future__ import annotations

import csv
import posixpath
import re
from pathlib import Path

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
            f"### On {path.parent.name}\n\n{_folded(named)}\n\nWritten by `python -m benchmarks {operator}`; "
            f"[the whole file]({link}) says how to read it."
        )
    if not sections:
        raise ValueError(f"{page} asks for the figures of {operator}, but benchmarks/results/cpu has none")
    return "\n\n".join(sections)


def curves(operator: str) -> str:
    """Markdown: the picture and the table of each processor's curve of the operator, or that there is none yet."""
    command = f"`python -m benchmarks.curves {operator}`"
    files = sorted((ROOT / "benchmarks" / "results" / "curves").glob(f"*/{operator}.csv"))
    sections = [_curve(path, command) for path in files]
    return "\n\n".join(sections) or f"No curve over sizes has been measured yet: {command} writes it."


def _curve(path: Path, command: str) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        points = list(csv.DictReader(file))
    names = list(dict.fromkeys(point["implementation"] for point in points))
    at = {(point["size"], point["implementation"]): point for point in points}
    lines = [["size", *names], ["---:"] * (1 + len(names))]
    for size in dict.fromkeys(point["size"] for point in points):
        lines.append([size, *(_cell(at[size, name]) if (size, name) in at else "-" for name in names)])
    about = points[0]
    svg = path.with_suffix(".svg").read_text(encoding="utf-8")
    # In the page itself, so that its text is the page's; a blank line would end the HTML block.
    picture = "\n".join(line for line in svg[svg.index("<svg") :].splitlines() if line.strip())
    return "\n\n".join(
        (
            f"### Over sizes, on {path.parent.name}",
            '<div class="curve" data-search-exclude role="img" '
            'aria-label="Time and memory over the size, as in the table below">\n'
            f"{picture}\n</div>",
            "Milliseconds, and in brackets the MiB beyond the outputs:",
            _folded("\n".join(f"| {' | '.join(line)} |" for line in lines)),
            f"Written by {command} on {about['date']}: {about['processor']}, {about['threads']} threads, torch "
            f"{about['torch']}, medians of {about['repeats']} repeats.",
        )
    )


def _folded(markdown: str) -> str:
    """Markdown that a reader opens with a click."""
    return f'<details markdown="1" data-search-exclude>\n<summary>The table</summary>\n\n{markdown}\n\n</details>'


def _cell(point: dict[str, str]) -> str:
    if not point["milliseconds"]:
        return point["status"]
    memory = f" ({point['beyond_outputs_mib']})" if point["beyond_outputs_mib"] else ""
    return f"{point['milliseconds']}{memory}"
