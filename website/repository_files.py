"""The repository's files that pages link to, as pages of the site, so that every link works without network."""

import csv
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedssl.tables.files import markdown_table

ROOT = Path(__file__).resolve().parents[1]
PICTURES = (".png", ".svg", ".jpg")
_LINK = re.compile(r"\]\(([^)\s#]+)")


def links(path: str, markdown: str) -> list[str]:
    """The files of the repository that the page at `path` links to."""
    targets = [posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in _LINK.findall(markdown)]
    return [target for target in targets if (ROOT / target).is_file()]


def linked_files(pages: Iterable[str]) -> list[str]:
    """All files outside docs/ that pages link to, and those that these link to."""
    waiting = list(pages)
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if path.endswith((".md", ".ipynb")):
            new = set(links(path, markdown_of(path))) - seen
            seen |= new
            waiting += new
    return sorted(path for path in seen if not path.startswith("docs/"))


def markdown_of(path: str) -> str:
    """The Markdown that shows a file: its own, a notebook's with the stored outputs, a table, or a listing."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(block for cell in json.loads(text)["cells"] for block in _cell(cell))
    if path.endswith(".csv"):
        head, *rows = csv.reader(text.splitlines())
        return f"# {path}\n\n{markdown_table(head, rows)}"
    language = "yaml" if path.endswith((".yaml", ".cff")) else "text"
    return f"# {path}\n\n`````{language}\n{text.rstrip()}\n`````\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    """The text or the code of a notebook's cell, what it printed, and what it drew with the `alt` of its metadata."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        if picture := output.get("data", {}).get("image/png"):
            image = f'<img alt="{cell["metadata"]["alt"]}" src="data:image/png;base64,{"".join(picture).strip()}">'
            yield f'<div class="wide-picture" tabindex="0">{image}</div>'
        else:
            text = output["text"] if "text" in output else output["data"]["text/plain"]  # printed, or a cell's value
            yield f"```text\n{''.join(text).rstrip()}\n```"
