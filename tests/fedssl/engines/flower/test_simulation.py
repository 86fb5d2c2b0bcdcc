"""The simulation leaves the run's folder that the engine in-process leaves, bit for bit, also if it was interrupted."""

import pytest
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import save_file

from fedssl.engines import engine_of
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.data.image_samples import write_two_classes
from tests.fedssl.engines.short_runs import StopsAfterRoundOne, results
from tests.fedssl.killed_runs import Killed
from tests.fedssl.models.test_weights import drawn

SIMULATED = {"engine": "flower-simulation"}


@pytest.fixture(autouse=True)
def without_identity(monkeypatch) -> None:
    """As in a process that no SuperLink has started."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)


@pytest.mark.parametrize("of", ["images in a file", "a part that trains"])
def test_the_run_is_the_same_bit_for_bit(of, finished, noisy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if of == "a part that trains":
        save_file(drawn("small_convnet").state_dict(), tmp_path / "weights.safetensors")
        own = AVERAGED | {"model": {"weights": str(tmp_path / "weights.safetensors"), "train": "last:1"}}
    else:
        folder = str(write_two_classes(tmp_path / "images"))
        data = {"name": "images", "path": folder, "image_size": 8, "memory_limit": 0}
        own = {"data": data, "partition": {"name": "iid", "clients": 3}}
    recipe = noisy(**own, **SIMULATED)
    engine_of(recipe).run(recipe, tmp_path / "simulated")
    assert results(finished(noisy(**own))) == results(tmp_path / "simulated")


def test_interrupted_and_resumed_with_more_rounds_the_run_is_the_same_bit_for_bit(finished, noisy, tmp_path):
    recipe, path = noisy(**METHODS["hetero_ssfl"], **SIMULATED), tmp_path / "simulated"
    with pytest.raises(Killed):
        engine_of(recipe).run(recipe, path, StopsAfterRoundOne())
    assert RunDirectory.open(path).checkpoint.round == 1
    engine_of(recipe).resume(path, overrides=["rounds=3"])
    assert results(finished(noisy(**METHODS["hetero_ssfl"], rounds=3))) == results(path)
