"""A page as its reader sees it: tables, text and images."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br"}
#: markup, an attribute's end, and the templates' own braces
HOSTILE = "<script>alert('x')</script> & \"co\" {{ 7919 * 7907 }} {% raw %} {# note #}"


class Page(HTMLParser):
    """A page's tables as lists of rows, its text and images; checks that tags are closed in order."""

    def __init__(self, path: Path):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.descriptions: list[str] = []
        self.captions: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        self.links += [v for k, v in attributes if k in ("href", "action", "srcset", "data") and v]
        if "src" in values:
            self.sources.append(values["src"])
            self.descriptions.append(values["alt"])
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "figcaption":
            self.captions.append("")
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data.replace("\u00a0", " ")
        if self.open and self.open[-1] == "figcaption":
            self.captions[-1] += data
        if self.open and self.open[-1] != "style":
            self.text += data

    def table(self, *header: str) -> list[list[str]]:
        """The rows of the table whose header begins so."""
        return next(t[1:] for t in self.tables if t[0][: len(header)] == list(header))
