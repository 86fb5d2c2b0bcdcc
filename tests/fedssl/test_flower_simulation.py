"""The simulation on Ray leaves the run's folder that this process leaves, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")
pytest.importorskip("ray", reason="ray is not installed: pip install .[flower]")

from fedssl.engines import engine_of, in_process
from fedssl.recipe import parse_recipe

from .conftest import ALIGNED, tiny_values
from .flower_deployment import with_package
from .test_in_process import contents

pytestmark = pytest.mark.skipif(
    "FEDSSL_TEST_DEADLINE" not in os.environ, reason="for an idle machine: FEDSSL_TEST_DEADLINE=45"
)
FEDU2 = {
    "aggregators": ["eua"],
    "regularizers": [{"name": "uniformity", "weight": 0.1, "tau_a": 0.8, "tau_b": 0.8}],
    "local_update": "replace",
}
SIMULATED = {"engine": "flower-simulation", "flower": {"cpus": 2, "object_store_megabytes": 100}}


def without_engine(found: dict[str, bytes]) -> dict[str, bytes]:
    """A run's folder but for its recipe, which names the engine."""
    return {name: data for name, data in found.items() if name != "recipe.yaml"}


@pytest.mark.parametrize("method", [ALIGNED, FEDU2], ids=["hetero_ssfl", "fedu2"])
def test_simulated_the_run_is_the_same_bit_for_bit(method, tiny, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a simulated client has one; a sum over another number of them rounds differently
    try:
        in_process.run(tiny(**method), tmp_path / "here")
        recipe = tiny(**method, **SIMULATED)
        engine_of(recipe).run(recipe, tmp_path / "simulated")
    finally:
        torch.set_num_threads(threads)
    assert without_engine(contents(tmp_path / "here")) == without_engine(contents(tmp_path / "simulated"))


def test_ctrl_c_ends_a_simulation_and_it_is_resumed(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(parse_recipe(tiny_values(rounds=2000, **SIMULATED)).to_yaml())
    path = tmp_path / "run"
    command = [sys.executable, "-m", "fedssl", "run", str(recipe), "--output", str(path)]
    environment = with_package() | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while process.poll() is None and not committed(path, 1):
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert f"continue with: fedssl run --resume {path}" in output
    assert "Traceback" not in output


def committed(path: Path, number: int) -> bool:
    return bool(list((path / "checkpoints").glob(f"server.round-{number:05d}*"))) if path.exists() else False
