"""Two processes of a gloo group, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.fedkernels.distributed.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not dist.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="this torch has no torch.distributed"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Stopped with the last test of a file: other tests of the same process count its children."""
    group = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()
