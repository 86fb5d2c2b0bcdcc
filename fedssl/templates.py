"""Fill the templates of pages, scripts and configurations."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _templates(package: str) -> Environment:
    return Environment(
        loader=PackageLoader(package),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def fill_template(package: str, name: str, /, **values: object) -> str:
    """Fill a file of a package's folder `templates/`; a missing value raises jinja2.UndefinedError.

    In HTML every value is escaped; in other files the values stand as they are.
    """
    return _templates(package).get_template(name).render(values)
