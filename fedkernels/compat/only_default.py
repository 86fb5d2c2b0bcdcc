"""The error for options that only the original has."""


def only_default(original: str, **options: tuple[object, object]) -> None:
    """Each of `options` is a pair (value, default).

    Raises:
        ValueError: a value differs from its default.
    """
    for name, (value, default) in options.items():
        if value is not default and value != default:
            raise ValueError(f"{name} must be {default!r}, which alone is supported here: use {original} for others")
