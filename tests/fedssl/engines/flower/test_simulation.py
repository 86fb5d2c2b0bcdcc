"""The simulation on Ray leaves the run's folder that this process leaves, bit for bit, also when it was interrupted
and got more rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file

from fedssl.engines import engine_of
from fedssl.errors import UserError
from fedssl.recipe.reading import load_recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.data.image_samples import write_two_classes
from tests.fedssl.engines.flower.deployment import MARK, PATIENCE, kill_marked, marked, poll, with_package
from tests.fedssl.engines.short_runs import results
from tests.fedssl.models.test_weights import drawn

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install .[flower]")
SIMULATED = {"engine": "flower-simulation", "flower": {"cpus": 2, "object_store_megabytes": 100}}

#: `fedssl` whose terminal sends Ctrl-C, to all its processes, when round 1 is committed; what strangers reach is noted
INTERRUPTED = """
import json, os, pathlib, signal, sys, threading
import grpc
from fedssl.cli import main
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.engines.flower.deployment import listening

real, really_install, heard = RunDirectory.commit, signal.signal, threading.Event()

def note(path):
    import ray
    ask = grpc.insecure_channel(ray.get_runtime_context().gcs_address)
    try:
        answer = str(ask.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=60))
    except grpc.RpcError as error:
        answer = error.code().name
    session = ray._private.worker._global_node.get_session_dir_path()
    path.write_text(json.dumps([listening(os.environ["FEDSSL_TEST_PROCESS"]), session, answer]))
    assert [p for p in pathlib.Path(session).parents if p.stat().st_mode & 0o777 == 0o700]

def commit(directory, number, *arguments, **keys):
    real(directory, number, *arguments, **keys)
    if number == 1:
        note(pathlib.Path(sys.argv[-1]).with_name("noted.json"))
        os.killpg(os.getpgrp(), signal.SIGINT)
        assert heard.wait(120)  # a busy machine's main thread takes its time, and round 2 must not be over by then

def install(number, handler):
    def hear(*arguments):
        handler(*arguments)
        heard.set()
    return really_install(number, hear if number == signal.SIGINT and callable(handler) else handler)

RunDirectory.commit = commit
signal.signal = install
main()
"""


@pytest.mark.nightly  # a run that was interrupted is compared below
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


def test_interrupted_by_ctrl_c_and_resumed_the_run_is_the_same_bit_for_bit(finished, noisy, tmp_path):
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "simulated"
    recipe.write_text(noisy(**METHODS["hetero_ssfl"], **SIMULATED).to_yaml())
    try:
        stopped = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, "run", str(recipe), "--output", str(path)],
            env=with_package() | {"OMP_NUM_THREADS": "1", MARK: f"{tmp_path}/"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            start_new_session=True,
        )
        assert stopped.returncode == 130, stopped.stdout
        assert f"continue with: fedssl run --resume {path}" in stopped.stdout
        assert "Traceback" not in stopped.stdout
        addresses, session, answer = json.loads((tmp_path / "noted.json").read_text())
        assert len(addresses) >= 3  # of Ray's own processes at least
        assert set(addresses) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        assert answer == "UNAUTHENTICATED"  # of somebody else on this machine
        assert not Path(session).exists()
        assert RunDirectory.open(path).checkpoint.round == 1
        poll(lambda: not marked(f"{tmp_path}/"), "Ray's processes have ended too")
    finally:
        kill_marked(f"{tmp_path}/")
    engine_of(load_recipe(recipe)).resume(path, overrides=["rounds=3"])
    assert results(finished(noisy(**METHODS["hetero_ssfl"], rounds=3))) == results(path)


def test_ray_that_was_imported_before_it_could_be_confined_is_refused(noisy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    recipe = noisy(**METHODS["hetero_ssfl"], **SIMULATED)
    with pytest.raises(UserError, match="has imported ray already: start the run in a new process"):
        engine_of(recipe).run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
