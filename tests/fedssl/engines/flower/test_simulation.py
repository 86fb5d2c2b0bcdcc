"""The simulation leaves the run's folder that the engine in-process leaves, bit for bit, also if it was interrupted."""

import pytest
from flwr.supercore.task_identity import TaskIdentity

from fedssl.engines import engine_of
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import METHODS
from tests.fedssl.engines.short_runs import StopsAfterRoundOne, results
from tests.fedssl.killed_runs import Killed

SIMULATED = {"engine": "flower-simulation"}


@pytest.fixture(autouse=True)
def without_identity(monkeypatch) -> None:
    """As in a process that no SuperLink has started."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)


def test_interrupted_and_resumed_with_more_rounds_the_run_is_the_same_bit_for_bit(finished, noisy, tmp_path):
    recipe, path = noisy(**METHODS["hetero_ssfl"], **SIMULATED), tmp_path / "simulated"
    with pytest.raises(Killed):
        engine_of(recipe).run(recipe, path, StopsAfterRoundOne())
    assert RunDirectory.open(path).checkpoint.round == 1
    engine_of(recipe).resume(path, overrides=["rounds=3"])
    assert results(finished(noisy(**METHODS["hetero_ssfl"], rounds=3))) == results(path)
