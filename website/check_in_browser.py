"""Looks at the built site in a headless Chromium: `python -m website.check_in_browser`, after `make docs`.

It needs the extra `browser` and a Chromium, and opens the pages as files, without network. On some pages (with
`--all-pages` on all) and those named on the command line (a run's report), at two widths, in both themes, it expects:

- no error in the console, and no address of another host;
- no serious finding of axe-core (contrast, names, keyboard);
- a page that does not scroll sideways: wide tables scroll in their own boxes.

It also moves the sliders of the figures by keyboard and compares what they show with the operators, and types the
questions and the words of website/questions.py into the search. Every problem is printed, and the exit status is 1 if
there is one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from website import questions
from website.repository_files import FOLDER, ROOT

SITE = ROOT / "build" / "site"
PAGES = (
    "index.html",
    "start.html",
    "methods.html",
    "methods/hetero_ssfl.html",
    "methods/fedu2.html",
    "operators/nt_xent.html",
    "options.html",
    "how_it_is_made.html",
    "notebooks/four_hospitals.html",
)
WIDTHS = (390, 1280)
THEMES = ("light", "dark")
SERIOUS = ("serious", "critical")


def missing() -> str | None:
    """Why the check cannot run here, None where it can."""
    for name in ("playwright", "axe_playwright_python"):
        if find_spec(name) is None:
            return f"{name} is not installed: pip install '.[browser]'"
    if chromium() is None:
        return "there is no Chromium: install chromium, or run python -m playwright install chromium"
    if not (SITE / "index.html").is_file():
        return "there is no site in build/site: run make docs"
    return None


def chromium() -> str | None:
    """The path of a Chromium: the system's, or Playwright's own."""
    from playwright.sync_api import sync_playwright

    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def every_page() -> list[Path]:
    """The pages of the site, without those that show a file of the repository."""
    return [path for path in sorted(SITE.rglob("*.html")) if path.relative_to(SITE).parts[0] != FOLDER]


def problems_of_page(browser: Any, path: Path, screenshots: Path | None = None) -> Iterator[str]:
    """What is wrong with one page, at both widths and in both themes."""
    from axe_playwright_python.sync_playwright import Axe

    for width in WIDTHS:
        for theme in THEMES:
            where = f"{path.name}, {width} pixels, {theme}"
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
            errors: list[str] = []
            page.on("console", lambda message, to=errors: to.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error, to=errors: to.append(str(error)))
            page.on("request", lambda request, to=errors: to.append(request.url) if _elsewhere(request.url) else None)
            page.goto(path.resolve().as_uri())
            page.wait_for_timeout(500)
            yield from (f"{where}: {text}" for text in errors)
            overhang = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            if overhang > 0:
                yield f"{where}: the page is {overhang} pixels too wide"
            for finding in Axe().run(page).response["violations"]:
                if finding["impact"] in SERIOUS:
                    places = "; ".join(" ".join(node["target"]) for node in finding["nodes"][:3])
                    yield f"{where}: {finding['id']}, {finding['help']}: {places}"
            if screenshots is not None:
                name = f"{path.parent.name}-{path.stem}-{width}-{theme}.png"
                page.screenshot(path=screenshots / name)
            page.close()


def problems_of_figures(browser: Any) -> Iterator[str]:
    """Moves every slider by keyboard and compares what the page shows with the operators."""
    import torch

    from fedkernels import linear_cka
    from fedssl.aggregators.eua import least_norm_step
    from website.figures import eua, fur

    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.goto((SITE / "methods" / "hetero_ssfl.html").resolve().as_uri())
    for keys in ({}, {"turn": "End"}, {"share": "End", "scale": "ArrowRight"}):
        _press(page, "cka", keys)
        (shown, _), places = _shown(page, "cka"), {}
        for side in (0, 1):
            drawn = page.locator(f"figure[data-figure=cka] circle.side{side}")
            places[side] = torch.tensor(
                [[float(c.get_attribute("cx")), -float(c.get_attribute("cy"))] for c in drawn.all()],
                dtype=torch.float64,
            )
        expected = float(linear_cka(places[0], places[1], centered=True))
        if abs(shown - expected) > 2e-3:
            yield f"CKA: the page shows {shown}, but the points that it draws have {expected:.3f}"

    page.goto((SITE / "methods" / "fedu2.html").resolve().as_uri())
    for keys in ({}, {"angle": "End", "length": "End"}, {"angle": "Home", "divisor": "End"}):
        _press(page, "eua", keys)
        at = {
            key: int(page.locator(f"figure[data-figure=eua] input[data-key={key}]").input_value())
            for key in ("angle", "length", "divisor")
        }
        deltas = eua.updates(eua.ANGLES[at["angle"]], eua.LENGTHS[at["length"]])
        p, shares = least_norm_step(deltas @ deltas.T, eua.DIVISORS[at["divisor"]], [1.0, 1.0])
        expected_numbers = [round(float(number), 3) for pair in zip(p, shares, strict=True) for number in pair]
        if (shown_numbers := _shown(page, "eua")) != expected_numbers:
            yield f"EUA: the page shows {shown_numbers}, but least_norm_step gives {expected_numbers}"

    positions, values, _ = fur.flow()
    for key, step in (("Home", 0), ("End", fur.STEPS)):
        _press(page, "fur", {"step": key})
        value, _, resultant = _shown(page, "fur")
        expected_pair = (float(values[step]), float(positions[step].mean(dim=0).norm()))
        if abs(value - expected_pair[0]) > 1e-3 or abs(resultant - expected_pair[1]) > 1e-3:
            yield f"FUR: step {step} shows {value} and {resultant}, but the term gives {expected_pair}"
    page.close()


def _elsewhere(address: str) -> bool:
    """Whether an address needs a network."""
    return not address.startswith(("file:", "data:", "blob:"))


def _press(page: Any, figure: str, keys: dict[str, str]) -> None:
    for slider, key in keys.items():
        page.locator(f"figure[data-figure={figure}] input[data-key={slider}]").press(key)


def _shown(page: Any, figure: str) -> list[float]:
    """The numbers of a figure, from top to bottom."""
    text = " ".join(page.locator(f"figure[data-figure={figure}] output b").all_inner_texts())
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def problems_of_search(browser: Any) -> Iterator[str]:
    """Types each question into the search: the first page found is the answer, or has the question as a result."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto((SITE / "index.html").resolve().as_uri())
    for question in questions.QUESTIONS:
        links = _found(page, question.words)
        first = _page(links[0])
        headings = [link.partition("#")[2] for link in links if _page(link) == questions.PAGE]
        if first != question.answer and not (first == questions.PAGE and question.heading in headings):
            yield f"the search for “{question.words}” finds {first} {headings} first, expected {question.answer}"
    for words, expected in questions.SEARCHES.items():
        if (first := _page(_found(page, words)[0])) != expected:
            yield f"the search for “{words}” finds {first} first, expected {expected}"
    page.close()


def _found(page: Any, words: str) -> list[str]:
    """Type words into the search of a page, and return the links that it finds."""
    box, results = page.locator(".md-search__input"), "a.md-search-result__link[href]"
    box.fill("")
    box.press("End")  # the theme searches when a key is released
    page.locator(results).first.wait_for(state="detached", timeout=60_000)
    box.fill(words)
    box.press("End")
    page.locator(results).first.wait_for(state="attached", timeout=60_000)
    return list(page.locator(results).evaluate_all("all => all.map(link => link.href)"))


def _page(link: str) -> str:
    """The page of the site that a link of the search leads to."""
    return re.split("[#?]", link)[0].partition("/build/site/")[2].replace(".html", ".md")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="more pages, such as a run's report.html")
    parser.add_argument("--all-pages", action="store_true", help="every page of the site but the repository's files")
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of each page, width and theme")
    options = parser.parse_args(arguments)
    if reason := missing():
        print(f"skipped: {reason}")
        return 0
    if options.screenshots is not None:
        options.screenshots.mkdir(parents=True, exist_ok=True)

    from playwright.sync_api import sync_playwright

    count = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        checks = [("figures", problems_of_figures(browser)), ("search", problems_of_search(browser))]
        for path in [*(every_page() if options.all_pages else (SITE / name for name in PAGES)), *options.pages]:
            checks.append((str(path), problems_of_page(browser, path, options.screenshots)))
        for name, problems in checks:
            print(name, flush=True)
            for problem in problems:
                count += 1
                print(f"  PROBLEM {problem}", flush=True)
        browser.close()
    print(f"{count} problems" if count else "no problem")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
