"""Fill the templates of pages, scripts and configurations."""

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_template(package: str, name: str, /, **values: object) -> str:
    """Fill a file of a package's folder `templates/`; a missing value raises jinja2.UndefinedError.

    In HTML every value is escaped; in other files the values stand as they are.
    """
    templates = Environment(
        loader=PackageLoader(package),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(name).render(values)
