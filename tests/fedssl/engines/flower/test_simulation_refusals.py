"""What the simulation refuses before it starts Ray."""

from __future__ import annotations

import pytest

from fedssl.engines.flower import simulation
from fedssl.errors import UserError


def test_without_ray_the_simulation_says_what_to_install(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Ray: pip install '(fedkernels-)?fedssl\[flower\]'"):
        simulation.run(tiny(engine="flower-simulation"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_deployment_is_not_run_in_one_process(quick, tmp_path):
    with pytest.raises(UserError, match="write its app with fedssl app"):
        simulation.run(quick(), tmp_path / "a")
    assert not (tmp_path / "a").exists()
