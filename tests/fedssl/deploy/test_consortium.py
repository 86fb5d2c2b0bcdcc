"""The consortium's file: its example, and an error for each wrong entry."""

from __future__ import annotations

import pytest

from fedssl.deploy.consortium import EXAMPLE, load_consortium, load_member
from fedssl.errors import UserError

SERVER = {"address": "localhost"}


def test_the_example_is_valid(tmp_path):
    (tmp_path / "consortium.yaml").write_text(EXAMPLE)
    consortium = load_consortium(tmp_path / "consortium.yaml")
    assert consortium.sites == ["hospital-a", "hospital-b"]
    assert consortium.server.wall


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "Our Consortium"}, "name"),
        ({"name": None}, "name"),
        ({"sites": []}, "sites"),
        ({"sites": ["a", "b", "a"]}, "each site needs a name of its own, but a occurs more than once"),
        ({"sites": ["server"]}, "a site cannot be named server: that is the name of another folder"),
        ({"sites": ["../b"]}, "the site's name '../b' is invalid: expected 1 to 40 lower-case letters"),
        ({"sites": ["a-"]}, "the site's name 'a-' is invalid"),
        ({"server": SERVER | {"port": 0}}, "server.port"),
        ({"server": SERVER | {"port": 8001}}, "port and internal_port must differ"),
        ({"server": SERVER | {"address": "local host; rm"}}, "server.address"),
        ({"server": {}}, "server.address"),
        ({"valid_days": 0}, "valid_days"),
        ({"site": ["a"]}, "site"),
    ],
)
def test_a_wrong_entry_is_named(changes, expected, consortium_file):
    path = consortium_file(**changes)
    with pytest.raises(UserError) as caught:
        load_consortium(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_a_file_that_is_none_or_missing_and_a_folder_that_provision_did_not_write_are_refused(tmp_path):
    path = tmp_path / "consortium.yaml"
    with pytest.raises(UserError, match=r"cannot be read: No such file.*fedssl provision --example prints one"):
        load_consortium(path)
    path.write_text("- hospital-a\n")
    with pytest.raises(UserError, match="must hold the keys name, server, sites, valid_days, got list"):
        load_consortium(path)
    with pytest.raises(UserError, match="name a folder that fedssl provision wrote"):
        load_member(tmp_path)
