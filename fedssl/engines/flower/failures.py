"""What the server is told where a site's work fails: nothing that names the site's files, images, classes or values.

An exception's text can hold all of these: a path that names a patient, a class that is a missing key, a value that
pydantic refuses. So a text leaves the site only where its type says that it may (`SendableError`). Of all
others the server gets a kind and a number, and the site's own log has the text under that number.
"""

import errno
import secrets
import traceback
from collections.abc import Callable

from ...errors import SendableError, UserError, memory_sentence


def failure_reason(error: Exception, occasion: str, log: Callable[[str], None]) -> str:
    """Return the line that the server gets about an exception on an occasion, and log the whole of it at the site."""
    if isinstance(error, SendableError):
        log(f"takes no part in {occasion}: {error}")
        return str(error)
    number = secrets.token_hex(4)
    lines = [str(error)] if isinstance(error, UserError) else "".join(traceback.format_exception(error)).splitlines()
    for line in lines:
        log(f"takes no part in {occasion}, failure {number}: {line}")
    return f"{_kind(error)}; its own log has the reason as failure {number}"


def _kind(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, UserError) else error  # such as a full disk
    if cause and memory_sentence(cause):
        return "it ran out of memory"
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on its disk"
    if isinstance(error, UserError):
        return "its data, settings or state cannot be used"
    if isinstance(error, OSError):
        return "a file of it cannot be read or written"
    return f"its code failed with {type(error).__name__}"
