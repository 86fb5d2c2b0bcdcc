"""Text of unknown origin: nothing of it moves a cursor, ends a line or begins a formula."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure

from fedssl.untrusted import NAME_PATTERN, plot_text, printable

HOSTILE = ("\x1b[31m", "a\rb", "a\nb", "a\0b", "\x9b2J", "\u202egnp.exe", "a\u2028b", "\ud800")


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_escaped_and_no_name_holds_them(text):
    assert printable(text).isprintable()
    assert not re.match(NAME_PATTERN, text) or text == "\ud800"  # YAML and UTF-8 refuse half a character themselves
    printable(text).encode()


def test_harmless_text_stays_as_it_is():
    for text in ("Hetero-SSFL (λ = 0.1), 50 %", "naïve", "日本", "a/b", r"a\b"):
        assert printable(text) == text
        assert re.match(NAME_PATTERN, text)
    assert printable("a\nb", keep="\n") == "a\nb"
    assert not re.match(NAME_PATTERN, "")
    assert not re.match(NAME_PATTERN, "a" * 201)


@pytest.mark.parametrize("text", [r"$\frac{$", "$", "$$", "a$b$c", r"\$x\$", "$x$\n$y$"])
def test_a_chart_shows_dollar_signs_literally(text):
    drawn = Figure().text(0, 0, plot_text(text))
    drawn.figure.canvas.draw()
    shown, is_formula = drawn._preprocess_math(drawn.get_text())
    assert (shown, is_formula) == (text, False)
