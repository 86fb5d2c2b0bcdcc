"""The repository's files that pages link to, as pages of the site, so that every link works without network."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: folder of the site that holds the pages of files outside docs/
FOLDER = "files"
#: what stands for a folder that a page links to, the first that exists
INDEX_NAMES = ("README.md", "table.md", "results.md")
PICTURES = (".png", ".svg", ".jpg")

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence) *$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash", ".cu": "cuda"}


def source_of(page: str) -> str:
    """The path in the repository, such as `docs/start.md`, of a page of the site, such as `start.md`."""
    return page.removeprefix(f"{FOLDER}/") if page.startswith(f"{FOLDER}/") else f"docs/{page}"


def page_of(path: str) -> str:
    """The page or picture of the site that shows a file of the repository.

    Raises:
        FileNotFoundError: the repository has no such file, or the folder has none that could stand for it.
    """
    target = ROOT / path
    if target.is_dir():
        index = next((name for name in INDEX_NAMES if (target / name).is_file()), None)
        if index is None:
            raise FileNotFoundError(f"{path} is a folder without {' or '.join(INDEX_NAMES)}; link to a file in it")
        path, target = posixpath.join(path, index), target / index
    if not target.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}/{path}" if path.endswith((".md", *PICTURES)) else f"{FOLDER}/{path}.md"


def rewrite_links(markdown: str, page: str) -> tuple[str, list[str]]:
    """A page with its relative links as links between pages of the site.

    Returns:
        The page, and the pages and pictures of the site that it links to.

    Raises:
        FileNotFoundError: a link leads to no file; the message names page and link.
    """
    source, linked = source_of(page), []

    def rewrite(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        try:
            destination = page_of(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{source} links to {match[2]}, but {error}") from None
        linked.append(destination)
        relative = posixpath.relpath(destination, posixpath.dirname(page) or ".")
        return f"{match[1]}{relative}{hash_sign}{anchor}{match[3]}"

    return _outside_code(markdown, lambda text: _LINK.sub(rewrite, text)), linked


def markdown_of(page: str) -> str:
    """The Markdown of a page that shows a file outside docs/: the file itself, or its text as a listing."""
    path = source_of(page)
    if (ROOT / path).is_file():  # a Markdown file; the page of another file has .md after its name
        return (ROOT / path).read_text(encoding="utf-8")
    path = path.removesuffix(".md")
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * 5
    return f"# {path}\n\n{fence}{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def linked_pages(pages: Iterable[str]) -> list[str]:
    """All pages and pictures outside docs/ that `pages` link to, and those that these link to."""
    waiting, seen = list(pages), set()
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        if page.endswith(".md"):
            outside = page.startswith(f"{FOLDER}/")
            text = markdown_of(page) if outside else (ROOT / "docs" / page).read_text(encoding="utf-8")
            waiting += rewrite_links(text, page)[1]
    return sorted(page for page in seen if page.startswith(f"{FOLDER}/"))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown` with `change` applied to all of it but code."""
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
