"""Process groups for the tests: of two and of four processes, and of this process alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.fedkernels.distributed.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not dist.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="this torch has no torch.distributed"))


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Stopped with the last test of a file: other tests of the same process count its children."""
    group = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
