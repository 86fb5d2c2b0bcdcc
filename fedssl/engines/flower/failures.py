"""What the server is told where a site's work fails: nothing that names the site's files, images, classes or values.

An exception's text can hold all of these: a path that names a patient, a class that is a missing key, a value that
pydantic refuses. So a text leaves the site only where its type says that it may (`SendableError`). Of all
others the server gets a kind and a number, and the site's own log has the text under that number.
"""

from __future__ import annotations

import errno
import secrets
import sys
import traceback

import torch

from ...errors import SendableError, UserError
from ...untrusted import printable


def failure_reason(error: Exception) -> str:
    """Return the line that the server gets about an exception, and write the whole of it to the site's log (stderr)."""
    if isinstance(error, SendableError):
        return str(error)
    number = secrets.token_hex(4)
    whole = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    text = printable(whole.rstrip(), keep="\n")
    print(f"fedssl: failure {number}: {text}", file=sys.stderr, flush=True)
    return f"{_kind(error)}; its own log has the reason as failure {number}"


def _kind(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, UserError) else error  # such as a full disk
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
        return "it ran out of memory"
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on its disk"
    if isinstance(error, UserError):
        return "its data, settings or state cannot be used"
    if isinstance(error, OSError):
        return "a file of it cannot be read or written"
    return f"its code failed with {type(error).__name__}"
