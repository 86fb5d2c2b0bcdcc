"""A consortium of two sites, and its folders; the tests are left out without Flower (pip install .[flower])."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from fedssl.deploy.consortium import EXAMPLE, load_consortium
from tests.fedssl.engines.flower.conftest import flower_process  # noqa: F401 - a fixture

if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def consortium_file(tmp_path) -> Callable[..., Path]:
    """Write consortium.yaml as the example is, with some keys changed."""

    def write(**changes) -> Path:
        path = tmp_path / "consortium.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(EXAMPLE) | changes))
        return path

    return write


@pytest.fixture
def provisioned(consortium_file, tmp_path) -> Callable[..., Path]:
    """Write the folders of a consortium, and give their folder."""
    from fedssl.deploy.folders import provision

    def write(keys_at_sites: bool = False, **changes) -> Path:
        folder = tmp_path / "consortium"
        provision(load_consortium(consortium_file(**changes)), folder, keys_at_sites)
        return folder

    return write


@pytest.fixture
def umask() -> Iterator[None]:
    """As most users have it; it is put back, because the commands that start Flower's processes change it."""
    before = os.umask(0o022)
    yield
    os.umask(before)
