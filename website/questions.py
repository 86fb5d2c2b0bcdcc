"""A newcomer's questions: what they type into the search, where the answer is, and the clicks that lead there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from website.repository_files import ROOT, rewrite_links

HOME = "index.md"
#: the page that holds every question as a heading, so the search finds it there as well
PAGE = "questions.md"


@dataclass(frozen=True)
class Question:
    """A question as it stands on `PAGE`, the words that are typed into the search, and the page that answers it."""

    question: str
    words: str
    answer: str

    @property
    def heading(self) -> str:
        """The anchor of the question's heading."""
        return "-".join(re.sub(r"[^\w\s-]", "", self.question.lower()).split())


QUESTIONS = (
    Question("Can I install it without a GPU?", "install without gpu", "start.md"),
    Question("My data has no labels.", "no labels", "own_images.md"),
    Question("My images are 16-bit, grey or DICOM.", "16-bit dicom", "own_images.md"),
    Question("Which method for weak devices?", "weak devices", "methods/lw_fedssl.md"),
    Question("My clients have different networks.", "different networks", "methods/hetero_ssfl.md"),
    Question("How do I add a loss, an aggregator or a schedule?", "add a loss", "add_a_method.md"),
    Question("What leaves my hospital?", "what leaves my hospital", "what_leaves_a_site.md"),
    Question("How long will my run take?", "how long", "speed.md"),
    Question("How much memory does a client need?", "how much memory", "operations.md"),
    Question("Can I resume a run after a crash?", "resume after crash", "command_line.md"),
    Question("Can I give a finished run more rounds?", "more rounds", "operations.md"),
    Question("My loss became NaN. Why?", "loss nan", "operations.md"),
    Question("How do I use the encoder afterwards?", "use the encoder", "own_images.md"),
    Question("How do I compare two methods fairly?", "compare two methods", "methods.md"),
    Question("Can I use one operator alone?", "one operator alone", "operators.md"),
    Question("Do the papers' results come out?", "papers results", "what_reproduces_what.md"),
)

#: words that are typed into the search, and the page that must come first: they are its tags in the search's index
SEARCHES = {
    "learning rate": "options.md",
    "effective rank": "glossary.md",
    "batch_size": "options.md",
    "custom loss": "add_a_method.md",
    "my own dataset": "own_images.md",
    "citation": "questions.md",
    "hyperparameter": "methods.md",
    "checkpoint": "operations.md",
    "early stop": "operations.md",
}


def clicks_to(question: Question) -> list[str]:
    """The pages from the home page to the answer, one for each click on a link in the pages' own text.

    Raises:
        ValueError: neither the home page nor the question's section of `PAGE` links to the answer.
    """
    from_home = _linked_pages(_text(HOME), HOME)
    if question.answer in from_home:
        return [question.answer]
    if PAGE in from_home and question.answer in _linked_pages(_section(question.question), PAGE):
        return [PAGE, question.answer]
    raise ValueError(
        f"docs/{PAGE} has no section {question.question!r} that links to {question.answer}, and docs/{HOME} has no "
        "such link: add it to the section"
    )


def _linked_pages(markdown: str, page: str) -> list[str]:
    return rewrite_links(markdown, page)[1]


def _section(title: str) -> str:
    """The text of `PAGE` below a heading; empty where there is no such heading."""
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", _text(PAGE), re.DOTALL | re.MULTILINE)
    return section[1] if section else ""


def _text(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")
