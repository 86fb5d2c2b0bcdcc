"""The client app: crashes and late work are named, and the run's name cannot leave the site's folder."""

from __future__ import annotations

import signal

import pytest

from fedssl.engines.flower.client import _site_from_file
from fedssl.errors import UserError
from fedssl.method import Method
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.flower.loop_grid import run_on, start, write_sites


def test_an_app_that_crashes_is_named(quick, tmp_path, monkeypatch):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b")
    real = Method.client_round

    def crash(method, client, *arguments):
        if client.index == 2:
            raise RuntimeError("no such\nkernel")
        return real(method, client, *arguments)

    monkeypatch.setattr(Method, "client_round", crash)
    warnings = run_on(recipe, directory, grid)
    assert warnings == [f"round {n}: client 2 is left out: its app failed: no such kernel" for n in (1, 2)]


def test_work_that_the_server_no_longer_waits_for_is_ended(quick, tmp_path, monkeypatch):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b")
    real = Method.client_round

    def hang(method, client, *arguments):
        if client.index == 2:
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
            signal.raise_signal(signal.SIGALRM)  # as the timer does when the time is over
        return real(method, client, *arguments)

    monkeypatch.setattr(Method, "client_round", hang)
    warnings = run_on(recipe, directory, grid)
    assert warnings == [
        f"round {n}: client 2 is left out: "
        "its work was stopped after 100 s, the round's deadline (flower.round_seconds)"
        for n in (1, 2)
    ]


def test_the_runs_name_cannot_leave_the_sites_folder(quick, tmp_path):
    write_sites(tmp_path)
    (tmp_path / "recipe.yaml").write_text(quick(**AVERAGED).to_yaml())
    states = _site_from_file(str(tmp_path / "recipe.yaml"), (("site", str(tmp_path / "site0.yaml")),)).states
    with pytest.raises(UserError, match="the server's name of the run is invalid: expected 1 to 64 letters"):
        states("../elsewhere")
