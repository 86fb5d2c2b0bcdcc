"""Process groups of two and of four processes for the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.fedkernels.distributed.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not dist.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="this torch has no torch.distributed"))


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()
