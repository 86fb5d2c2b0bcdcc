"""What a user should know of the data that is no error: one line each, on stderr where nobody set up `logging`."""

import logging

_LOGGER = logging.getLogger("fedssl.data")


def notify(text: str) -> None:
    """Tell the user; the text is one line."""
    _LOGGER.warning("fedssl: %s", text)
