"""What MkDocs calls while it builds the site (mkdocs.yml, `hooks`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # MkDocs runs this file by its path

from website import equations, generated, questions, quoted_results, repository_files

_GENERATED = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)
_FROM_ANOTHER_HOST = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)""")
#: of pages in the search; attacks.md names nearly every word of the other pages
_BOOSTS = {"questions.md": 3, "glossary.md": 2, "attacks.md": 0.2, "how_it_is_made.md": 0.5}
_equations: dict[str, list[str]] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to."""
    pages = [file.src_uri for file in files.documentation_pages()]
    for page in repository_files.linked_pages(pages):
        if page.endswith(".md"):
            files.append(File.generated(config, page, content=repository_files.markdown_of(page)))
        else:
            path = repository_files.ROOT / repository_files.source_of(page)
            files.append(File.generated(config, page, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated or quoted, make links lead to pages of the site, and take the equations out."""
    uri = page.file.src_uri
    markdown = quoted_results.without_marks(quoted_results.fill(markdown))
    if uri.startswith(repository_files.FOLDER):
        page.meta["search"] = {"boost": 0.1}  # pages that explain come before the files that they explain
    elif uri in _BOOSTS:
        page.meta["search"] = {"boost": _BOOSTS[uri]}
    page.meta["tags"] = [words for words, answer in questions.SEARCHES.items() if answer == uri]
    markdown, _linked = repository_files.rewrite_links(markdown, uri)
    markdown = _GENERATED.sub(lambda match: generated.text(match[1], uri), markdown)
    markdown, _equations[uri] = (
        (markdown, []) if uri.startswith(repository_files.FOLDER) else equations.take_out(markdown)
    )
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put the equations back, and let the keyboard scroll what is wide."""
    html = equations.put_back(html, _equations.pop(page.file.src_uri))
    html = html.replace("<svg ", "<svg data-search-exclude ")  # labels of drawings are no text to be found
    return html.replace("<pre>", '<pre tabindex="0">')


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Leave out the theme's page for unknown addresses: its links need a site at a host's root."""
    return "" if template_name == "404.html" else output_content


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Name the dialog of the search, and end the build where a page loads anything from another host.

    Raises:
        PluginError: a script, style or picture has an address of another host.
    """
    if elsewhere := _FROM_ANOTHER_HOST.search(output):
        raise PluginError(f"{page.file.src_uri} would load {elsewhere[1]}, but the site must work without network")
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
