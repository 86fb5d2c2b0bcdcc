"""Every question of a newcomer stands on the page of questions, and two clicks from home lead to its answer."""

from __future__ import annotations

import re

import pytest

from website import questions
from website.repository_files import ROOT


@pytest.mark.parametrize("question", questions.QUESTIONS, ids=lambda question: question.words)
def test_two_clicks_lead_to_the_answer(question):
    assert questions.clicks_to(question)[-1] == question.answer


def test_the_page_asks_these_questions_and_no_others():
    page = (ROOT / "docs" / questions.PAGE).read_text(encoding="utf-8")
    assert re.findall(r"^### (.+)$", page, re.MULTILINE) == [question.question for question in questions.QUESTIONS]


def test_an_answer_that_no_page_links_to_is_refused():
    with pytest.raises(ValueError, match=r"docs/questions.md has no section 'Is it free\?' that links to start2.md"):
        questions.clicks_to(questions.Question("Is it free?", "free", "start2.md"))


def test_the_table_of_compare_two_methods_can_be_run(tmp_path):
    from fedssl.tables.table import load_table

    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(example)
    assert [row.label for row in load_table(str(path)).rows] == ["FedU2", "FedBYOL", "local-only"]
