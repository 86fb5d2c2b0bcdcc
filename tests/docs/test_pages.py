"""What the pages show works as it stands there, every question has its answer, every figure its source."""

import ast
import importlib
import re
import sys

import pytest

import fedssl
from fedssl.tables.runner import table_cells
from fedssl.tables.sweep import trials_of
from fedssl.tables.table import load_table
from tests.fedssl.cli.test_texts import texts
from website.repository_files import ROOT, links

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}
PACKAGES = "fedssl", "fedkernels"
#: The libraries that the blocks of "Use it in ..." replace; one of them has two blocks.
ORIGINALS = ("open_clip", "lightly", "pytorch_metric_learning", "sentence_transformers", "torchjd", "torch_cka", "ot")
#: what marks a figure that was measured: a spread, an accuracy, a rate, a time, a ratio of speeds
MEASURED = re.compile(r"±|\d\.\d %|images/s|\d (?:ms|s)\b|\d times as fast|points (?:above|below)")
#: a link to a result, a page of results, a command, or the words that a figure without a file must have
SOURCE = re.compile(
    r"benchmarks/results|`python -m |demo\.md|`make demo`|fedssl run-table|by hand|speed\.md|<!-- generated"
)
#: its seconds are settings
SETTINGS = ("deploy.md", "A reverse proxy in front of the SuperLink")
#: a newcomer's questions, and the words that are typed into the search; tests/docs/test_in_browser.py does
QUESTIONS = {
    "Can I install it without a GPU?": "install without gpu",
    "My data has no labels.": "no labels",
    "My images are 16-bit, grey or DICOM.": "16-bit dicom",
    "Which method for weak devices?": "weak devices",
    "My clients have different networks.": "different networks",
    "How do I add a loss, an aggregator or a schedule?": "add a loss",
    "What leaves my hospital?": "what leaves my hospital",
    "How long will my run take?": "how long",
    "How much memory does a client need?": "how much memory",
    "Can I resume a run after a crash?": "resume after crash",
    "Can I give a finished run more rounds?": "more rounds",
    "My loss became NaN. Why?": "loss nan",
    "How do I use the encoder afterwards?": "use the encoder",
    "How do I compare two methods fairly?": "compare two methods",
    "Can I use one operator alone?": "one operator alone",
    "Do the papers' results come out?": "papers results",
}
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def code_of(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("operators/")])
def test_the_example_of_an_operators_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one writes a picture
    code = "\n".join(code_of(page))
    assert code
    exec(code, {})


def test_the_errors_that_questions_explains_are_the_sources_own():
    quoted = re.findall(r"^\*\*`(.+?)`\*\*", PAGES["questions.md"], re.MULTILINE)
    assert len(quoted) == 11
    for quote in quoted:
        # "supervised" stands for the objective's name; the sources have a place to fill in there.
        wanted = re.escape(quote.replace("supervised", "...")).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(wanted, text, re.DOTALL) for name in PACKAGES for _, text in texts(name)), quote


def answer_to(question):
    """The page to which the question's section leads first."""
    section = re.search(rf"^### {re.escape(question)}\n(.*?)^##", PAGES["questions.md"], re.DOTALL | re.MULTILINE)
    return links("docs/questions.md", section[1])[0].removeprefix("docs/")


def test_every_question_has_an_answer_two_clicks_from_the_first_page():
    assert re.findall(r"^### (.+)$", PAGES["questions.md"], re.MULTILINE) == list(QUESTIONS)
    assert "docs/questions.md" in links("docs/index.md", PAGES["index.md"])
    assert all(answer_to(question) in PAGES for question in QUESTIONS)


def test_the_table_of_compare_two_methods_can_be_run(tmp_path):
    path = tmp_path / "mine.yaml"
    example, sweep = code_of("methods.md", "yaml")
    path.write_text(example)
    assert [row.label for row in load_table(str(path)).rows] == ["FedU2", "FedBYOL", "local-only"]
    path.write_text(example.replace("seeds: [0, 1, 2]", "seeds: [1, 2, 3]") + sweep)
    trials = trials_of(load_table(path))
    assert len(table_cells(trials, tmp_path)) == 3 * 8


def test_the_table_with_an_own_part_can_be_run(tmp_path):
    (part,) = (code for code in code_of("add_a_method.md") if "class Variance" in code)
    (tmp_path / "variance.py").write_text(part)
    (tmp_path / "mine.yaml").write_text(code_of("add_a_method.md", "yaml")[0])
    trials = trials_of(load_table(tmp_path / "mine.yaml", trust=True), trust=True)
    names = {type(one).__name__ for cell in table_cells(trials, tmp_path) for one in cell.recipe.regularizers}
    assert names == {"Variance"}


@pytest.mark.parametrize("number", range(len(ORIGINALS) + 1))
def test_a_block_of_use_it_in_runs_without_the_library_that_it_replaces(number, monkeypatch):
    blocks = code_of("use_it_in.md")
    assert len(blocks) == len(ORIGINALS) + 1
    for name in ORIGINALS:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it raises ImportError
    exec(blocks[number], {"__name__": "block"})


def sections():
    """The page, the title and the text of each section of the pages, without its code and equations."""
    for page, text in PAGES.items():
        text = re.sub(r"^```.*?^```$|\$\$.*?\$\$", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"^    .*$|\$[^$\n]*\$", "", text, flags=re.MULTILINE)
        parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
        yield from ((page, *section) for section in zip(parts[1::2], parts[2::2], strict=True))


def test_a_section_with_measured_figures_names_their_source():
    """Link to the result in benchmarks/results, or name the command."""
    measured = [(page, title, text) for page, title, text in sections() if MEASURED.search(text)]
    without = [(page, title) for page, title, text in measured if not SOURCE.search(text)]
    assert without == [SETTINGS]


def test_no_result_in_a_docstring_is_shown_as_a_type():
    """The site shows as a type what stands before a colon in the first line of "Returns" or "Yields"."""
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, DOCUMENTED)]
        docstrings = "\n".join(ast.get_docstring(node) or "" for node in nodes)
        lines = re.findall(r"^ *(?:Returns|Yields):\n *(.+)$", docstrings, re.MULTILINE)
        assert not [line for line in lines if ":" in line], path


def test_the_page_of_the_python_api_has_every_public_name():
    documented = re.findall(r"^::: (\S+)$", "\n".join(PAGES.values()), re.MULTILINE)
    assert len(set(documented)) == len(documented)  # or a link to it would not know where to lead
    entries = re.findall(r"^::: (\S+)$", PAGES["python_api.md"], re.MULTILINE)
    assert {entry.rsplit(".", 1)[1] for entry in entries} >= set(fedssl.__all__)
    for entry in entries:
        module, name = entry.rsplit(".", 1)
        assert getattr(importlib.import_module(module), name).__doc__, entry
