"""Equations in LaTeX as MathML, which browsers draw without a script and without fonts from elsewhere.

`$x$` is an equation in a line, and a paragraph between `$$` and `$$` one of its own. Markdown would read their
underscores and asterisks as emphasis, so a mark stands for each equation until the page is HTML.
"""

from __future__ import annotations

import re

from latex2mathml.converter import convert

_CODE = r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence) *$|`[^`\n]+`"
_EQUATION = re.compile(
    _CODE + r"|\$\$(?P<display>.+?)\$\$|(?<![\w$\\])\$(?P<inline>[^$\n]+?)\$(?![\w$])", re.DOTALL | re.MULTILINE
)
_MARK = "equation-{}-of-this-page"


def take_out(markdown: str) -> tuple[str, list[str]]:
    """A page with a mark for each equation outside code, and the equations as MathML in their order.

    Raises:
        ValueError: an equation has a command that `latex2mathml` does not know.
    """
    equations: list[str] = []

    def replace(match: re.Match[str]) -> str:
        latex = match["display"] or match["inline"]
        if latex is None:
            return match[0]
        block = match["display"] is not None
        mathml = convert(
            latex.strip().replace(r"\arg\min", r"\operatorname{argmin}"), display="block" if block else "inline"
        )
        if "\\" in mathml:  # what latex2mathml does not know stays as it is
            raise ValueError(f"latex2mathml cannot convert all of the equation {latex.strip()}; write it another way")
        # A wide equation scrolls in its own box, which the keyboard must be able to reach.
        if block:
            mathml = f'<div class="equation" tabindex="0" role="group" aria-label="equation">{mathml}</div>'
        equations.append(mathml)
        mark = _MARK.format(len(equations) - 1)
        return f"\n\n{mark}\n\n" if block else mark

    return _EQUATION.sub(replace, markdown), equations


def put_back(html: str, equations: list[str]) -> str:
    """The page's HTML with its equations."""
    for number, mathml in reversed(list(enumerate(equations))):
        mark = _MARK.format(number)
        html = html.replace(f"<p>{mark}</p>", mathml).replace(mark, mathml)
    return html
