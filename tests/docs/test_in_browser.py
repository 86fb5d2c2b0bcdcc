"""The built site and a run's report in a headless Chromium, without network: needs the extras docs and browser."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from fedssl.recipe.reading import parse_recipe
from fedssl.reports.report import write_report
from tests.docs.test_pages import QUESTIONS, answer_to
from tests.fedssl.conftest import tiny_values
from tests.fedssl.reports.synthetic_runs import evaluated, write_run
from website.repository_files import ROOT

pytestmark = pytest.mark.nightly  # minutes: the site is built, and every page opened at two widths and in two themes
hooks = pytest.importorskip("website.hooks", exc_type=ImportError)
Axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe
sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright

PAGES = (
    *("index.html", "start.html", "methods.html", "methods/hetero_ssfl.html", "methods/fedu2.html", "options.html"),
    *("operators/nt_xent.html", "how_it_is_made.html", "files/notebooks/four_hospitals.ipynb.html", "report"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two runs, with made-up figures."""
    folder = tmp_path_factory.mktemp("report")
    for name, after in (("ours", 60.0), ("alone", 50.0)):
        rows = evaluated(0, "knn", [40.0, 42.0]) + evaluated(1, "loss", [2.0, 3.0]) + evaluated(2, "knn", [after, 51.0])
        write_run(folder / name, parse_recipe(tiny_values(name=name)), rows, counts=[[30, 10], [0, 20]])
    return write_report([folder / "ours", folder / "alone"], folder / "page.html", images=False)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")  # or Playwright's own
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as launched:
            yield launched


def opened(browser, path, **options):
    page = browser.new_page(**options)
    page.problems = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    near = ("file:", "data:", "blob:")
    page.on("request", lambda one: None if one.url.startswith(near) else page.problems.append(one.url))
    page.goto(path.as_uri())
    page.wait_for_timeout(500)
    return page


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_problem(browser, site, report, name, width, theme):
    path = report if name == "report" else site / name
    page = opened(browser, path, viewport={"width": width, "height": 900}, color_scheme=theme)
    assert page.problems == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    findings = [one for one in Axe().run(page).response["violations"] if one["impact"] in ("serious", "critical")]
    assert not [(one["help"], [node["target"] for node in one["nodes"]]) for one in findings]
    page.close()


def test_sliders_show_the_numbers_of_their_places(browser, site):
    page = opened(browser, site / "methods" / "fedu2.html")
    figures = {name: page.locator(f"figure[data-figure={name}]") for name in ("fur", "eua")}
    data = {name: json.loads(figure.locator("script").text_content()) for name, figure in figures.items()}
    figures["fur"].locator("input").press("End")
    for key in ("angle", "length", "divisor"):
        figures["eua"].locator(f"input[data-key={key}]").press("End")
    shown = {name: re.findall(r"\d\.\d+", figure.locator("output").inner_text()) for name, figure in figures.items()}
    assert list(map(float, shown["fur"])) == [data["fur"][key][-1] for key in ("value", "mass", "resultant")]
    p, shares = data["eua"]["p"][-1], data["eua"]["shares"][-1]
    assert list(map(float, shown["eua"])) == [number for pair in zip(p, shares, strict=True) for number in pair]


def test_the_search_finds_the_answers(browser, site):
    """The first page found is the answer, or has the question as a result."""
    page = opened(browser, site / "index.html", viewport={"width": 1440, "height": 900})
    wrong = []
    for question, words in QUESTIONS.items():
        links = found(page, words, site)
        first = links[0].partition("#")[0]
        heading = "questions.md#" + "-".join(re.sub(r"[^\w\s-]", "", question.lower()).split())
        if first != answer_to(question) and not (first == "questions.md" and heading in links):
            wrong.append((words, links))
    for answer, words in ((page, words) for page, tags in hooks.SEARCHES.items() for words in tags):
        links = found(page, words, site)
        if links[0].partition("#")[0] != answer:
            wrong.append((words, links))
    assert wrong == []


def found(page, words, site):
    """Type words into the search, and return the pages that it finds, with their headings."""
    box, results = page.locator(".md-search__input"), "a.md-search-result__link[href]"
    box.fill("")
    box.press("End")  # the theme searches when a key is released
    page.locator(results).first.wait_for(state="detached", timeout=60_000)
    box.fill(words)
    box.press("End")
    page.locator(results).first.wait_for(state="attached", timeout=60_000)
    links = page.locator(results).evaluate_all("all => all.map(link => link.href)")
    return [re.sub(r"\?[^#]*", "", link).removeprefix(f"{site.as_uri()}/").replace(".html", ".md") for link in links]
