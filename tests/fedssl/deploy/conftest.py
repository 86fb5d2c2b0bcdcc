"""A consortium of two sites, and its folders; the tests are left out without Flower (pip install .[flower])."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.fedssl.engines.flower.conftest import flower_process  # noqa: F401 - a fixture

if find_spec("flwr") is None:
    collect_ignore_glob = ["test_*.py"]

EXAMPLE = {
    "name": "our-consortium",
    "server": {"address": "localhost", "port": 8000, "internal_port": 8001},
    "sites": ["hospital-a", "hospital-b"],
}


@pytest.fixture
def consortium_file(tmp_path) -> Callable[..., Path]:
    """Write consortium.yaml with some keys changed; a key with the value None is left out."""

    def write(**changes) -> Path:
        values = {key: value for key, value in (EXAMPLE | changes).items() if value is not None}
        path = tmp_path / "consortium.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def provisioned(consortium_file, tmp_path) -> Callable[..., Path]:
    """Write the folders of a consortium, and give their folder."""
    from fedssl.deploy.consortium import load_consortium
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
