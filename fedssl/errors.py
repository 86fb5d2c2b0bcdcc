"""The one exception that means "the user can mend this", and how to install what is missing."""

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
