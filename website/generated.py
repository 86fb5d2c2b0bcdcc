"""What a page's `<!-- generated: KIND ARGUMENTS -->` stands for."""

from __future__ import annotations

from website import command_line, figures, measured, methods, notebooks, options, parts


def text(request: str, page: str) -> str:
    """The Markdown or HTML for a request such as `options`, `commands` or `method fedu2` on a page of the site.

    Raises:
        ValueError: the request is none of these.
    """
    kind, *arguments = request.split()
    if kind == "options":
        return options.page()
    if kind == "commands":
        return command_line.page()
    if kind == "parts":
        return parts.page(*arguments)
    if kind == "method":
        return methods.facts(*arguments, page=page)
    if kind == "methods":
        return methods.table()
    if kind == "measured":
        return measured.table(*arguments, page=page)
    if kind == "figure":
        return figures.html(*arguments)
    if kind == "notebook":
        return notebooks.page(*arguments)
    if kind == "curves":
        return measured.curves(*arguments)
    kinds = "options, commands, parts, method, methods, measured, curves, figure or notebook"
    raise ValueError(f"{page} asks for {request!r}; expected {kinds}")
