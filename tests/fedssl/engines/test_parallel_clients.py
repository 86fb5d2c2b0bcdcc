"""Several clients at a time: the same run as one after another, the same errors, and no process that stays behind."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.data.stored_images import open_stored_images
from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.engines.workers import pack, unpack
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2, LW_FEDSSL
from tests.fedssl.engines.test_in_process import contents

ORCHESTRA: dict[str, Any] = {
    "objective": {"name": "orchestra", "clusters": 8, "memory": 16, "features": 8},
    "aggregators": ["weighted_mean", {"name": "orchestra_clusters", "local_clusters": 4, "steps": 2}],
    "local_update": "replace",
}
METHODS: dict[str, dict[str, Any]] = {
    "fedbyol": AVERAGED,
    "fedema": AVERAGED | {"local_update": "fedema"},
    "hetero_ssfl": ALIGNED,
    "fedu2": FEDU2 | {"client_states": "memory"},
    "lw_fedssl": LW_FEDSSL,
    "orchestra": ORCHESTRA,
    "bfloat16": AVERAGED | {"training": {"local_epochs": 1, "batch_size": 8, "precision": "bfloat16"}},
}
#: three of four clients a round on two workers: a worker gets clients that it has not had before
FEW: dict[str, Any] = {
    "partition": {"name": "iid", "clients": 4},
    "clients_per_round": 3,
    "evaluation": {"neighbors": 3, "linear": {"epochs": 1}},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def results(path: Path) -> dict[str, bytes]:
    """Everything that a run leaves, without the recipe, in which `clients_parallel` stands."""
    files = contents(path)
    manifest = json.loads(files.pop("checkpoints/manifest.json"))
    del files["recipe.yaml"], manifest["digests"]["recipe.yaml"]
    return files | {"manifest": json.dumps(manifest).encode()}


@pytest.fixture(scope="module")
def one_after_another(noisy, tmp_path_factory):
    """The folder of a finished run of a method, its clients one after another."""
    folder = tmp_path_factory.mktemp("one-after-another")

    def path(method: str) -> Path:
        if not (folder / method).exists():
            run(noisy(**FEW | METHODS[method]), folder / method)
        return folder / method

    return path


@pytest.mark.parametrize("method", METHODS)
def test_two_clients_at_a_time_give_the_same_run(method, one_after_another, noisy, tmp_path):
    run(noisy(**FEW | METHODS[method], clients_parallel=2), tmp_path / "two")
    assert results(tmp_path / "two") == results(one_after_another(method))
    assert multiprocessing.active_children() == []


def test_workers_that_are_spawned_give_the_same_run(one_after_another, noisy, tmp_path, monkeypatch):
    """As on macOS and Windows, which have no server to fork from: each worker imports everything itself."""
    methods = []

    def only_spawn() -> list[str]:
        methods.append("spawn")
        return ["spawn"]

    monkeypatch.setattr(multiprocessing, "get_all_start_methods", only_spawn)
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: pytest.fail("the fork server is used"))
    run(noisy(**FEW | METHODS["hetero_ssfl"], clients_parallel=2), tmp_path / "spawned")
    assert methods
    assert results(tmp_path / "spawned") == results(one_after_another("hetero_ssfl"))
    assert multiprocessing.active_children() == []


def test_the_order_in_which_clients_are_ready_leaves_no_trace_in_the_folder(tmp_path):
    manifests = []
    for order in ([1, 2, 0], [2, 0, 1]):
        directory = RunDirectory.create(tmp_path / str(order[0]), {"recipe.yaml": "{}"})
        for k in order:
            directory.write_client(k, 1, Message({"a": torch.ones(k + 1)}))
        directory.commit(1, Message(), finished=False)
        manifests.append((directory.checkpoints / "manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


class KillsWorkers(Observer):
    """Kills all workers when the second client of the second round is about to begin."""

    def __init__(self) -> None:
        self.clients: list[int] = []  # that have begun in the second round

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if round_number != 2:
            return
        self.clients.append(index)
        if len(self.clients) == 2:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGKILL)


def test_a_killed_worker_is_told_with_its_client_and_the_run_resumes(one_after_another, noisy, tmp_path):
    progress = KillsWorkers()
    with pytest.raises(UserError, match=r"the worker process of client \d was ended by signal SIGKILL") as error:
        run(noisy(**FEW | METHODS["fedbyol"], clients_parallel=2), tmp_path / "a", progress)
    named = int(str(error.value).split("client ")[1].split()[0])
    assert named in progress.clients  # one of the two that were at work
    assert len(progress.clients) == 2
    assert multiprocessing.active_children() == []
    assert RunDirectory.open(tmp_path / "a").checkpoint.round == 1
    resume(tmp_path / "a")
    assert results(tmp_path / "a") == results(one_after_another("fedbyol"))


class CountsWorkers(Observer):
    """How many worker processes there are when clients begin."""

    def __init__(self) -> None:
        self.counts: set[int] = set()

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        self.counts.add(len(multiprocessing.active_children()))


@pytest.mark.parametrize("method", ["fedbyol", "bfloat16"])
@pytest.mark.parametrize(("before", "after", "workers"), [(2, 1, {0}), (1, 2, {2}), (2, None, {2})])
def test_a_run_resumes_with_other_clients_at_a_time(before, after, workers, method, one_after_another, noisy, tmp_path):
    class StopsInTheSecondRound(Observer):
        def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
            if round_number == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(noisy(**FEW | METHODS[method], clients_parallel=before), tmp_path / "a", StopsInTheSecondRound())
    recipe, progress = (tmp_path / "a/recipe.yaml").read_bytes(), CountsWorkers()
    resume(tmp_path / "a", progress, clients_parallel=after)
    assert progress.counts == workers
    assert results(tmp_path / "a") == results(one_after_another(method))
    assert (tmp_path / "a/recipe.yaml").read_bytes() == recipe


def test_a_diverging_client_gives_the_same_error(noisy, tmp_path):
    recipe = noisy(**FEW | {"objective": "supervised", "training": {"batch_size": 8, "learning_rate": 1e30}})
    told = []
    for parallel in (1, 2):
        with pytest.raises(UserError, match="loss became") as error:
            run(recipe.model_copy(update={"clients_parallel": parallel}), tmp_path / str(parallel))
        told.append(str(error.value))
    assert told[0] == told[1]
    assert multiprocessing.active_children() == []


PART = """
from fedssl.local_updates.replace import Replace

class Mine(Replace):
    def receive(self, local):
        super().receive(local)
        if local.number == 2:
            raise ZeroDivisionError("in my part")
"""


def test_an_error_of_ones_own_part_comes_with_its_traceback(noisy, tmp_path):
    (tmp_path / "mine.py").write_text(PART)
    update = {"local_update": str(tmp_path / "mine.py")}
    with pytest.raises(RuntimeError, match=r"client \d: (?s:.*)mine\.py(?s:.*)ZeroDivisionError: in my part"):
        run(noisy(**FEW | AVERAGED | update, clients_parallel=2), tmp_path / "a")
    assert multiprocessing.active_children() == []


def test_clients_parallel_is_the_in_process_engines(noisy):
    recipe = noisy(**AVERAGED, clients_parallel=2, engine="flower-simulation")
    with pytest.raises(UserError, match="clients_parallel=2 is for engine in-process, got engine flower-simulation"):
        build_federation(recipe)


def test_a_message_is_the_same_after_the_pipe():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 3, 5, 6, generator=generator)
    tensors = {
        "last": whole,
        "channels last": whole.contiguous(memory_format=torch.channels_last),
        "transposed": whole[0, 0].T,
        "bfloat16": whole.bfloat16(),
        "bool": whole > 0,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "cut": whole[:, :, 1:3],
        "first": torch.arange(3, dtype=torch.int32),
    }
    message = Message(tensors, {"n": 3, "x": 0.1}, {"kind": "a", "on": True}, {"loss": float("nan")})
    taken = unpack(pack(message))
    assert list(taken.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert taken.tensors[name].dtype == tensor.dtype
        assert torch.equal(taken.tensors[name], tensor)
        if name not in ("expanded", "cut"):
            assert taken.tensors[name].stride() == tensor.stride()
    assert (taken.numbers, taken.config) == (message.numbers, message.config)
    assert str(taken.metrics) == str(message.metrics)


def _send_rows(connection, images) -> None:
    connection.send(images[torch.tensor([2, 0])].tolist())


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_images_in_a_file_are_read_by_another_process_where_the_file_was_deleted(start_method, tmp_path):
    pixels = torch.arange(3 * 4, dtype=torch.uint8).reshape(3, 1, 2, 2)
    (tmp_path / "images").write_bytes(pixels.numpy().tobytes())
    images = open_stored_images(tmp_path / "images", (1, 2, 2), 3)
    (tmp_path / "images").unlink()
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_rows, args=(theirs, images))
    process.start()
    theirs.close()
    assert ours.recv() == pixels[[2, 0]].tolist()
    process.join()


def processes_of_session(session: int) -> list[int]:
    """The living processes of a session: the command's, its workers and the server that they are forked from."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            alive.append(int(stat.parent.name))
    return alive


@pytest.mark.parametrize("kind", [pytest.param("SIGKILL", marks=pytest.mark.nightly), "SIGINT"])
def test_a_stopped_command_leaves_no_process_and_resumes(kind, noisy, tmp_path):
    """Ctrl-C goes to all processes of a terminal, SIGKILL to the command alone."""
    recipe = noisy(**FEW | METHODS["fedbyol"] | {"rounds": 12})
    run(recipe, tmp_path / "whole")
    (tmp_path / "recipe.yaml").write_text(recipe.model_copy(update={"clients_parallel": 2}).to_yaml())
    path = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedssl", "run", str(tmp_path / "recipe.yaml"), "--output", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while process.poll() is None and not (path / "timings.csv").exists():
        time.sleep(0.02)
    assert len(processes_of_session(process.pid)) >= 3
    if kind == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    output, errors = process.communicate(timeout=120)
    assert errors == ""
    if kind == "SIGINT":
        assert process.returncode == 130
        assert f"continue with: fedssl run --resume {path}" in output
    deadline = time.monotonic() + 60
    while (left := processes_of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert not RunDirectory.open(path).checkpoint.finished
    resume(path)
    assert results(path) == results(tmp_path / "whole")
