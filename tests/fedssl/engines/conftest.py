"""One thread for all tests of engines: a sum over another number of threads rounds differently."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread) -> None:
    """As sites, simulated clients and the processes of workers have."""
