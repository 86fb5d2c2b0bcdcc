from tests.fedssl.cli.conftest import fedssl  # noqa: F401 - a fixture
