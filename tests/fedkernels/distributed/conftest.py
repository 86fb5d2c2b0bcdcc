"""Process groups of two and of four processes for the tests of this folder."""

import pytest
import torch.distributed as dist

if not dist.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", [2, 4], ids=["two ranks", "four ranks"], indirect=True)
