"""What MkDocs calls while it builds the site (mkdocs.yml, `hooks`)."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # MkDocs runs this file by its path

from website.generated import KINDS
from website.repository_files import PICTURES, ROOT, linked_files, markdown_of

_GENERATED = re.compile(r"^<!-- generated: (\w+)(.*) -->$", re.MULTILINE)
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_FROM_ANOTHER_HOST = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)""")
#: of pages in the search; attacks.md names nearly every word of the other pages
_BOOSTS = {"questions.md": 3, "glossary.md": 2, "attacks.md": 0.2, "how_it_is_made.md": 0.5}
#: by page the words that are typed into the search to find it first: its tags in the search's index
SEARCHES = {
    "add_a_method.md": ["custom loss"],
    "glossary.md": ["effective rank"],
    "methods.md": ["hyperparameter"],
    "operations.md": ["checkpoint", "early stop"],
    "options.md": ["learning rate", "batch_size"],
    "own_images.md": ["my own dataset"],
    "questions.md": ["citation"],
}


class Page(File):
    """A page of the site whose file need not be Markdown."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: Any) -> Files:
    """Call every file by its path in the repository, as links do, and add those outside docs/ that pages link to."""
    for file in files:
        if file.src_dir == config.docs_dir:
            _ = file.abs_src_path, file.url  # MkDocs would compute both by the new name
            file.src_uri = f"docs/{file.src_uri}"
    for path in linked_files(file.src_uri for file in files.documentation_pages()):
        if path.endswith(PICTURES):
            added = File.generated(config, path, abs_src_path=str(ROOT / path))
            added.dest_uri = f"files/{path}"
        else:
            added = Page.generated(config, path, content=markdown_of(path))
            added.dest_uri = f"files/{re.sub('README$', 'index', path.removesuffix('.md'))}.html"
        files.append(added)
    return Files(files)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in what is generated, and say what the page is found by."""
    path = page.file.src_uri.removeprefix("docs/")
    # Pages that explain come before the files that they explain.
    page.meta["search"] = {"boost": 0.1 if path == page.file.src_uri else _BOOSTS.get(path, 1)}
    page.meta["tags"] = SEARCHES.get(path, [])
    return _GENERATED.sub(lambda match: KINDS[match[1]](*match[2].split()), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn equations into MathML, which needs no script, and let the keyboard scroll what is wide."""
    return _EQUATION.sub(_mathml, content).replace("<pre>", '<pre tabindex="0">')


def _mathml(match: re.Match[str]) -> str:
    block = match[1] == "div"
    latex = html.unescape(match[2]).strip().replace(r"\arg\min", r"\operatorname{argmin}")
    mathml = convert(latex, display="block" if block else "inline")
    if "\\" in mathml:  # what latex2mathml does not know stays as it is
        raise PluginError(f"latex2mathml cannot convert all of the equation {latex}; write it another way")
    # A wide equation scrolls in its own box, which the keyboard must be able to reach.
    return f'<div class="equation" tabindex="0" role="group" aria-label="equation">{mathml}</div>' if block else mathml


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
