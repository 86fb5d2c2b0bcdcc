"""The command line, called in this process."""

from tests.fedssl.cli.conftest import fedssl  # noqa: F401 - a fixture
