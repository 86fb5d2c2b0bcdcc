"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """Bad input from outside: a recipe, a file, a command line, a full disk.

    The message is one line that names what is wrong, what was expected, what it got and what to do. The
    command line prints it and exits with code 2; nothing has been half-written when it is raised.
    """
