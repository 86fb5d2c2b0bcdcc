"""The one exception that means "the user can mend this", and how to install what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version


class UserError(ValueError):
    """Bad input from outside: a recipe, a file, a command line, a full disk.

    The message is one line that names what is wrong, what was expected, what it got and what to do. The
    command line prints it and exits with code 2; nothing has been half-written when it is raised.
    """


class SendableError(UserError):
    """A UserError whose message may leave a site: it names nothing but what the server knows.

    That is options of the recipe, versions, numbers of clients and rounds, and tensors that travel; never a file, an
    image, a class or a value of the site's own.
    """


def memory_sentence(error: BaseException) -> str | None:
    """Return what to tell of an error where memory is wanting, of which torch has several types; None of others."""
    says = ("allocate memory", "Storage size calculation overflowed")
    if isinstance(error, MemoryError) or "OutOfMemory" in repr(error) or any(text in str(error) for text in says):
        return f"the memory does not suffice ({_reason(error)}): free some, or use smaller networks, images or batches"
    return None


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def explained(claim: str, advice: str = "") -> Iterator[None]:
    """Raise whatever a library raises here as a UserError: the claim, the library's reason in brackets, and the advice.

    Where memory is wanting, that is said in place of the claim, as the input may be right.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any type
        raise UserError(memory_sentence(error) or f"{claim} ({_reason(error)}){advice}") from error


def installed_distribution() -> str:
    """Name of the distribution that holds fedssl: its own wheel's, or the one that the source tree installs."""
    try:
        version("fedssl")
    except PackageNotFoundError:
        return "fedkernels-fedssl"
    return "fedssl"


def install_command(extra: str) -> str:
    """Return the command that installs the optional packages of one name, as in "pip install 'fedssl[export]'"."""
    return f"pip install '{installed_distribution()}[{extra}]'"
