"""The pages of the parts: each part's documentation and its code."""

from __future__ import annotations

import ast
from functools import cache

from website.repository_files import ROOT


@cache
def class_of(folder: str, name: str) -> str:
    """The dotted name of the class of a part, such as `fedssl.aggregators.eua.EUA`.

    Raises:
        ValueError: the file has no class with a base whose name is that of the folder's parts, or it has no docstring.
    """
    module = ast.parse((ROOT / "fedssl" / folder / f"{name}.py").read_text(encoding="utf-8"))
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    last = classes[-1] if classes else None  # helpers stand before the part
    if last is None or ast.get_docstring(last) is None:
        raise ValueError(f"fedssl/{folder}/{name}.py has no class with a docstring")
    return f"fedssl.{folder}.{name}.{last.name}"


def names(folder: str) -> list[str]:
    """The sorted names of the parts in `fedssl/<folder>/`."""
    files = (ROOT / "fedssl" / folder).glob("*.py")
    return sorted(file.stem for file in files if file.stem not in ("__init__", "base"))


def page(folder: str) -> str:
    """Markdown: what a part of the kind overrides, then each shipped part, with its code."""
    base = ast.parse((ROOT / "fedssl" / folder / "base.py").read_text(encoding="utf-8"))
    interface = [node for node in base.body if isinstance(node, ast.ClassDef)][-1].name
    blocks = [f"::: fedssl.{folder}.base.{interface}\n    options:\n      members: true\n"]
    blocks += [f"::: {class_of(folder, name)}\n" for name in names(folder)]
    return "\n".join(blocks)


def link(folder: str, name: str) -> str:
    """A link to a part's documentation, from any page."""
    return f"[`{name}`][{class_of(folder, name)}]"
