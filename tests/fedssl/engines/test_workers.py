"""Several clients at a time give the run of one after another, bit for bit; the workers' errors, ends and messages."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
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
from tests.fedssl.engines.every_tensor import assert_same, every_kind_of_tensor
from tests.fedssl.engines.flower.deployment import MARK, marked, poll
from tests.fedssl.engines.short_runs import SMALL, results
from tests.fedssl.killed_runs import Killed, KilledIn

#: three of four clients a round on two workers: a worker gets clients that it has not had before
FEW: dict[str, Any] = {
    "partition": {"name": "iid", "clients": 4},
    "clients_per_round": 3,
    "evaluation": SMALL["evaluation"],
}
#: the opening round's answers are of models that no message fills
BOTH = AVERAGED | {"aggregators": ["weighted_mean", "representation_mean"], "regularizers": ["cka_alignment"]}
ROUNDED = FEDU2 | {"training": {"local_epochs": 1, "batch_size": 8, "precision": "bfloat16"}}


@pytest.mark.parametrize("method", [ALIGNED, LW_FEDSSL, BOTH], ids=["hetero_ssfl", "lw_fedssl", "both"])
def test_two_clients_at_a_time_give_the_same_run(method, finished, noisy, tmp_path):
    run(noisy(**FEW | method, clients_parallel=2), tmp_path / "two")
    assert results(tmp_path / "two") == results(finished(noisy(**FEW | method)))
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


class CountsWorkers(Observer):
    """How many worker processes there are when clients begin."""

    def __init__(self) -> None:
        self.counts: set[int] = set()

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        self.counts.add(len(multiprocessing.active_children()))


@pytest.mark.parametrize(("before", "after", "count", "method"), [(2, 1, 0, AVERAGED), (1, 2, 2, ROUNDED)])
def test_a_run_resumes_with_other_clients_at_a_time(before, after, count, method, finished, noisy, tmp_path):
    with pytest.raises(Killed):
        run(noisy(**FEW | method, clients_parallel=before), tmp_path / "a", KilledIn(2, 0))
    progress = CountsWorkers()
    resume(tmp_path / "a", progress, overrides=[f"clients_parallel={after}"])
    assert max(progress.counts) == count
    assert results(tmp_path / "a") == results(finished(noisy(**FEW | method)))


def test_clients_parallel_is_the_in_process_engines(noisy):
    recipe = noisy(**AVERAGED, clients_parallel=2, engine="flower-simulation")
    with pytest.raises(UserError, match="clients_parallel=2 is for engine in-process, got engine flower-simulation"):
        build_federation(recipe)


# Errors and ends


@pytest.fixture(scope="module")
def recipe_of(noisy):
    """Build a recipe whose clients are trained by two workers, or in this process."""
    values = AVERAGED | {"evaluation": SMALL["evaluation"], "partition": {"name": "iid", "clients": 3}}
    return lambda parallel=2, **changes: noisy(**values | changes, clients_parallel=parallel)


def test_a_diverging_client_gives_the_error_of_one_process(recipe_of, tmp_path):
    told, training = [], {"local_epochs": 1, "batch_size": 8, "learning_rate": 1e30}
    refusal = r"client 0's loss became .* in round 1, step \d+; .* lower training.learning_rate"
    for parallel in (1, 2):
        with pytest.raises(UserError, match=refusal) as error:
            run(recipe_of(parallel, training=training, objective="supervised"), tmp_path / str(parallel))
        told.append(str(error.value))
    assert told[0] == told[1]
    assert multiprocessing.active_children() == []


PART = """
from fedssl.regularizers.base import Regularizer

class Mine(Regularizer):
    def start_round(self, local):
        def term(step):
            raise ZeroDivisionError("in my part")
        return term
"""


def test_an_error_comes_with_its_traceback(recipe_of, tmp_path):
    (tmp_path / "mine.py").write_text(PART)
    with pytest.raises(RuntimeError, match=r"client \d: (?s:.*)mine\.py(?s:.*)ZeroDivisionError: in my part"):
        run(recipe_of(regularizers=[str(tmp_path / "mine.py")]), tmp_path / "a")
    assert multiprocessing.active_children() == []


class KillsWorkers(Observer):
    """Kills all workers when the second client of the second round is about to begin."""

    def __init__(self) -> None:
        self.clients: list[int] = []  # that have begun in the second round

    def client_began(self, round_number: int, index: int, position: int, clients: int) -> None:
        if round_number == 2:
            self.clients.append(index)
        if len(self.clients) == 2:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGKILL)


def test_a_killed_worker_is_told_and_the_run_resumes(recipe_of, finished, tmp_path):
    progress = KillsWorkers()
    with pytest.raises(UserError, match="a worker process ended: most likely the memory ran out"):
        run(recipe_of(), tmp_path / "a", progress)
    assert len(progress.clients) >= 2
    assert multiprocessing.active_children() == []
    assert RunDirectory.open(tmp_path / "a").checkpoint.round == 1
    assert resume(tmp_path / "a").checkpoint.finished
    assert results(tmp_path / "a") == results(finished(recipe_of(parallel=1)))


@pytest.mark.parametrize("kind", ["SIGINT", "SIGKILL"])
def test_a_stopped_command_leaves_no_process_and_resumes(kind, recipe_of, finished, tmp_path):
    """Ctrl-C goes to all processes of a terminal, SIGKILL to the command alone."""
    (tmp_path / "recipe.yaml").write_text(recipe_of(rounds=12).to_yaml())
    path = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedssl", "run", str(tmp_path / "recipe.yaml"), "--output", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: f"{tmp_path}/"},
    )
    while process.poll() is None and not (path / "timings.csv").exists():
        time.sleep(0.02)
    assert len(marked(f"{tmp_path}/")) >= 3
    if kind == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    output, errors = process.communicate(timeout=120)
    assert errors == "" or (kind == "SIGKILL" and "leaked semaphore objects" in errors)  # of the pool's queues
    if kind == "SIGINT":
        assert process.returncode == 130
        assert f"continue with: fedssl run --resume {path}" in output
    poll(lambda: marked(f"{tmp_path}/") == [], "no process is left", seconds=60)
    assert not RunDirectory.open(path).checkpoint.finished
    resume(path)
    assert results(path) == results(finished(recipe_of(parallel=1, rounds=12)))


# What workers are sent


def test_a_message_is_the_same_after_the_pipe():
    message = every_kind_of_tensor()
    taken = unpack(pack(message))
    assert_same(taken, message)
    assert list(taken.tensors) == list(message.tensors)
    dense = set(message.tensors) - {"expanded", "cut", "slice"}
    assert all(taken.tensors[name].stride() == message.tensors[name].stride() for name in dense)


def _send_rows(connection, images) -> None:
    connection.send(images[torch.tensor([2, 0])].tolist())


def test_images_in_a_file_are_read_by_another_process_where_the_file_was_deleted(tmp_path):
    pixels = torch.arange(3 * 4, dtype=torch.uint8).reshape(3, 1, 2, 2)
    (tmp_path / "images").write_bytes(pixels.numpy().tobytes())
    images = open_stored_images(tmp_path / "images", (1, 2, 2), 3)
    (tmp_path / "images").unlink()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_rows, args=(theirs, images))
    process.start()
    theirs.close()
    assert ours.recv() == pixels[[2, 0]].tolist()
    process.join()
