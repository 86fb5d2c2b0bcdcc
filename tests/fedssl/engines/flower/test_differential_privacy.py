"""Runs with Flower's differential privacy: the server's noise, and how far clipping lets the mean move."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")


from fedssl.engines import in_process
from fedssl.engines.flower.privacy import private_federation
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, FEDU2
from tests.fedssl.engines.flower.loop_grid import run_on
from tests.fedssl.engines.flower.secure_runs import EQUAL, FEDEMA, HUGE, LAYER_WISE, assert_close, start_stages, weights
from tests.fedssl.engines.stopped_runs import metric


def test_the_servers_noise_is_scaled_by_the_clients_in_the_mean(tiny):
    privacy = {"name": "fixed_clipping", "clipping_norm": 0.5, "noise_multiplier": 1.2}
    recipe = tiny(**AVERAGED, **EQUAL, engine="flower", flower={"differential_privacy": privacy})
    plain = build_federation(recipe).method
    state = plain.initial_state()
    reply = Message(dict(state.tensors), {"samples": 1})
    broken = Message(dict(state.tensors), {"samples": float("nan")})
    noisy = private_federation(build_federation(recipe)).method.aggregate(state, {0: reply, 1: reply, 2: broken}, 1)
    floats = [name for name, t in state.tensors.items() if t.is_floating_point()]
    weights = [name for name in floats if not name.endswith("running_var")]
    noise = torch.cat([(noisy.tensors[name] - state.tensors[name]).flatten() for name in weights])
    assert len(noise) > 4000
    assert float(noise.std()) == pytest.approx(1.2 * 0.5 / 2, rel=0.06)
    for name, tensor in state.tensors.items():
        assert noisy.tensors[name].dtype == tensor.dtype
        if name not in floats:
            assert torch.equal(noisy.tensors[name], tensor)
        if name.endswith("running_var"):
            assert float(noisy.tensors[name].min()) >= 0
    assert noisy.config == {"refused/2": "samples is nan, expected a positive number"}


@pytest.mark.parametrize("method", [FEDU2, FEDEMA, LAYER_WISE], ids=["fedu2", "fedema", "layers"])
def test_without_noise_and_clipping_the_run_is_the_plain_one(method, private, tiny, tmp_path):
    in_process.run(tiny(**method | EQUAL), tmp_path / "plain")
    privacy = {"name": "local_dp", "clipping_norm": 1e6, "epsilon": 1e30, "delta": 1e-5}
    recipe = private(dp=privacy, **method | EQUAL)
    assert run_on(recipe, *start_stages(recipe, tmp_path / "private")) == []
    assert_close(tmp_path / "plain", tmp_path / "private", atol=1e-6)
    start = build_federation(recipe).method.initial_state().tensors
    counters = {name: t for name, t in start.items() if not t.is_floating_point()}
    state = RunDirectory.open(tmp_path / "private").server_state().tensors
    assert counters
    assert all(torch.equal(state[name], tensor) for name, tensor in counters.items())
    assert metric(tmp_path / "private", "loss", 1) == {}


def test_a_small_clipping_norm_bounds_how_far_the_mean_moves(private, tmp_path):
    privacy = HUGE | {"clipping_norm": 0.01}
    recipe = private(dp=privacy, **AVERAGED | EQUAL, rounds=1)
    run_on(recipe, *start_stages(recipe, tmp_path / "private"))
    start = build_federation(recipe).method.initial_state().tensors
    moved = sum(float((t.double() - start[name]).square().sum()) for name, t in weights(tmp_path / "private").items())
    assert 0 < math.sqrt(moved) <= 0.01 * (1 + 1e-3)
