"""The notebooks of `notebooks/` as pages, and the command that runs them and stores what they print.

    python -m website.notebooks      # after a notebook has changed; needs the extra `docs`

A page shows the outputs that are stored in the notebook. `make docs` runs nothing; the tests run every cell
(tests/docs/test_site.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from website.repository_files import ROOT

FOLDER = ROOT / "notebooks"


def cells(path: Path) -> list[dict[str, Any]]:
    """A notebook's cells, with `source` as one text."""
    read = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in read]


def page(name: str) -> str:
    """Markdown: a notebook's text, its code and its stored outputs.

    Raises:
        ValueError: a cell has code and was never run; the message says how to run it.
    """
    path = FOLDER / f"{name}.ipynb"
    blocks = []
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            blocks.append(cell["source"].replace("](../docs/", "](../"))  # the page is in docs/notebooks/
            continue
        if cell["execution_count"] is None:
            raise ValueError(f"notebooks/{path.name} has a cell that was not run: run python -m website.notebooks")
        blocks += [f"```python\n{cell['source']}\n```", *_outputs(cell)]
    blocks.append(f"The notebook is `notebooks/{path.name}`. Its outputs were stored by `python -m website.notebooks`.")
    return "\n\n".join(blocks)


def _outputs(cell: dict[str, Any]) -> Iterator[str]:
    """What a cell printed and drew. The description of a picture stands in the cell's metadata, as `alt`."""
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            description = cell["metadata"].get("alt")
            if not description:
                raise ValueError("a notebook's picture has no description: set `alt` in the metadata of its cell")
            source = "".join(data["image/png"]).replace("\n", "")
            image = f'<img alt="{description}" src="data:image/png;base64,{source}">'
            yield f'<div class="wide-picture" tabindex="0">{image}</div>'
        else:
            text = "".join(output.get("text") or data.get("text/plain", ""))
            yield f"```text\n{text.rstrip()}\n```"


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    # The kernel is another process, which must find these packages, too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=1800, record_timing=False).execute()
        for cell in notebook.cells:  # warnings of the notebook's own machinery
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(notebook, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
