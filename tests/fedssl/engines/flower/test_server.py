"""The Flower engine without processes: its messages, its server and client app, a site's file, the app's folder."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.error import Error
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load as load_toml
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from google.protobuf.message import DecodeError

from fedssl.aggregators.weighted_mean import WeightedMean
from fedssl.engines import in_process
from fedssl.engines.flower import nodes as flower_nodes
from fedssl.engines.flower import server as flower
from fedssl.engines.flower.folder import write_app
from fedssl.engines.flower.privacy import private_federation
from fedssl.engines.flower.server import FlowerClients, make_client_app, make_server_app
from fedssl.engines.flower.site import load_site, site_federation
from fedssl.engines.flower.wire import from_records, to_records
from fedssl.engines.rounds import first_files, run_rounds
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.reading import load_recipe
from fedssl.recipe import Recipe
from fedssl.run_directory import SITES_RUN, RunDirectory, alone_in
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2, LW_FEDSSL
from tests.fedssl.engines.flower.deployment import free_port, make_authority, missing_tools, with_package
from tests.fedssl.engines.test_in_process import contents, metric

needs_openssl = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
KINDS = {"hetero_ssfl": ALIGNED, "fedu2": FEDU2, "lw_fedssl": LW_FEDSSL, "weighted_mean": AVERAGED, "local": {}}


@pytest.fixture(autouse=True)
def _identity():
    """Flower notes in its processes who they are, and asks for it when a message is made."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class LoopGrid:
    """Flower's grid with the nodes in this process: each has a client app and a node config."""

    def __init__(self, app, configs: dict[int, dict]):
        self.app, self.configs = app, configs
        self.contexts = {node: Context(0, node, config, RecordDict(), {}) for node, config in configs.items()}
        self.replies: dict[str, FlowerMessage] = {}
        self.numbers = itertools.count()
        self.silent: set[int] = set()  # nodes that answer no round
        self.tamper = lambda node, reply: None
        self.left: list[FlowerMessage] = []  # what left the nodes

    def get_node_ids(self):
        return list(self.configs)

    def push_messages(self, messages):
        names = []
        for message in messages:
            node, name = message.metadata.dst_node_id, f"message {next(self.numbers)}"
            names.append(name)
            if node in self.silent and message.metadata.message_type != "query":
                continue
            message.metadata.__dict__["_message_id"] = name
            try:
                reply = self.app(message, self.contexts[node])
            except Exception as error:
                reply = FlowerMessage(Error(2, str(error)), reply_to=message)
            self.tamper(node, reply)
            self.left.append(reply)
            self.replies[name] = reply
        return names

    def pull_messages(self, names):
        return [self.replies.pop(name) for name in list(names) if name in self.replies]


class Told(in_process.Silent):
    def __init__(self):
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def start(recipe: Recipe, path: Path, sites: list[Path] | None = None) -> tuple[RunDirectory, LoopGrid]:
    """A run's folder and its nodes; simulated ones, or with a site's file each."""
    federation = build_federation(recipe)
    files = first_files(federation) | ({SITES_RUN: "run"} if sites else {})
    directory = RunDirectory.create(path, files)
    app = make_client_app((path / "recipe.yaml").absolute(), simulated=not sites)
    if sites:
        configs = {11 + i: {"site": str(file)} for i, file in enumerate(sites)}
    else:
        configs = {11 + k: {"partition-id": k} for k in range(len(federation.client_rows))}
    return directory, LoopGrid(app, configs)


def go(recipe: Recipe, directory: RunDirectory, grid: LoopGrid) -> list[str]:
    told = Told()
    federation = private_federation(build_federation(recipe))
    clients = FlowerClients(grid, federation, directory, told, "run", threading.Event())
    clients.connect()
    run_rounds(federation, directory, told, clients)
    return told.warnings


class Clock:
    """Stands for the module `time`: waiting takes no time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def quick(tiny, monkeypatch):
    """The tiny recipe under engine flower, whose server waits without waiting."""
    monkeypatch.setattr(flower, "time", Clock())
    waits = {"round_seconds": 100, "connect_seconds": 10}
    return lambda **changes: tiny(**({"engine": "flower", "flower": waits} | changes))


def write_sites(folder: Path, count: int = 3, **keys) -> list[Path]:
    files = []
    for k in range(count):
        file = folder / f"site{k}.yaml"
        file.write_text(yaml.safe_dump({"client": k, "state": str(folder / f"state{k}")} | keys))
        files.append(file)
    return files


# Messages


def test_every_dtype_travels_as_it_is():
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    tensors = {str(dtype): (torch.rand(3, 5) * 100).to(dtype) for dtype in dtypes}
    tensors |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(7), "empty": torch.empty(0, 4)}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["not finite"] = torch.tensor([float("nan"), float("inf")])
    message = Message(
        tensors, {"samples": 3, "loss": 0.1}, {"layer": "encoder", "centered": True, "rounds": 2, "t": 0.5}
    )
    records = to_records(message)
    inflated = RecordDict.inflate(records.deflate(), records.children)
    for name, record in inflated.items():
        inflated[name] = type(record).inflate(record.deflate(), record.children)
    came = from_records(inflated)
    assert list(came.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert came.tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(came.tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert (came.numbers, came.config) == (message.numbers, message.config)
    assert type(came.numbers["samples"]) is int


def floats(count: int, dtype: str = "float32", serialisation: str = "torch.raw") -> Array:
    return Array(dtype, (count,), serialisation, bytes(4 * count))


LAYOUT = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "dimensions": [2, 0], "sizes": [2, 3]}
NONE = "the message's layout is none"


@pytest.mark.parametrize(
    ("arrays", "layout", "expected"),
    [
        ({"float32": floats(5)}, {}, r"a came with 20 bytes for the shape \[2, 3\] of float32"),
        ({"float32": floats(6)}, {}, r"b came with 0 bytes for the shape \[\] of float32"),
        ({"float32": floats(8)}, {}, "the array float32 came with 32 bytes for tensors of 28"),
        ({"float32": floats(7), "int32": floats(1, "int32")}, {}, "the array int32 came with 4 bytes for tensors of 0"),
        ({"float32": floats(7, serialisation="numpy.ndarray")}, {}, "came as numpy.ndarray of float32"),
        ({"float32": floats(7, "int32")}, {}, "the array float32 came as torch.raw of int32"),
        ({}, {}, "a came without an array of float32"),
        ({"float32": floats(7)}, {"dtypes": ["object"] * 2}, NONE),
        ({"float32": floats(7)}, {"names": ["a", "a"]}, NONE),
        ({"float32": floats(7)}, {"names": ["a"]}, NONE),
        ({"float32": floats(7)}, {"names": "ab"}, NONE),
        ({"float32": floats(7)}, {"sizes": [2]}, NONE),
        ({"float32": floats(7)}, {"sizes": [-2, -3]}, NONE),
        ({"float32": floats(7)}, {"sizes": [2.0, 3.0]}, NONE),
        ({"float32": floats(7)}, {"sizes": [10**9, 10**9]}, "a came with 28 bytes for the shape"),
        ({"float32": floats(7)}, {"dimensions": [3, -1]}, NONE),
    ],
)
def test_arrays_that_are_none_of_ours_are_refused(arrays, layout, expected):
    records = to_records(Message())
    records["tensors"] = ArrayRecord(arrays)
    records["layout"] = ConfigRecord(LAYOUT | layout)
    with pytest.raises(UserError, match=expected):
        from_records(records)


def test_what_flower_sends_is_the_message_and_little_more():
    """Bytes of all of a Flower message's objects against `num_bytes`, which is what a run's metrics hold."""
    recipe = load_recipe("fedu2")
    federation = build_federation(recipe)
    message = federation.method.broadcast(federation.method.initial_state(), [0], 1)[0]
    content = to_records(message)
    content["task"] = ConfigRecord({"run": "0" * 16, "client": 0, "round": 1, "start": -1, "seconds": 3600.0})
    sent = FlowerMessage(content, dst_node_id=1, message_type="train", ttl=10.0)
    parts = get_all_nested_objects(sent).values()
    assert message.num_bytes < sum(len(part.deflate()) for part in parts) < 1.01 * message.num_bytes
    assert len(parts) < 15 < len(message.tensors)  # each is sent by a request of its own


# Rounds


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_is_the_one_in_this_process_bit_for_bit(kind, tiny, tmp_path):
    recipe = tiny(**KINDS[kind])
    in_process.run(recipe, tmp_path / "a")
    go(recipe, *start(recipe, tmp_path / "b"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("kind", ["hetero_ssfl", "fedu2", "lw_fedssl"])
def test_clients_keep_their_states_at_their_sites(kind, quick, tiny, tmp_path):
    in_process.run(tiny(**KINDS[kind]), tmp_path / "a")
    recipe = quick(**KINDS[kind])
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    assert go(recipe, directory, grid) == []
    for name in ("metrics.csv", "spectrum.csv", "partition.csv", "checkpoints/server.round-00002.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for k in range(3):
        [*_, newest] = sorted((tmp_path / f"state{k}" / "run").iterdir())
        assert newest.read_bytes() == (tmp_path / "a" / "checkpoints" / newest.name).read_bytes()
    assert not list((tmp_path / "b" / "checkpoints").glob("client*"))
    with pytest.raises(UserError, match="client 0's model is at its own site"):
        directory.client_state(0)


def test_interrupted_between_rounds_the_run_continues_from_the_same_states(quick, tiny, tmp_path, monkeypatch):
    in_process.run(tiny(**ALIGNED, rounds=3), tmp_path / "a")
    recipe = quick(**ALIGNED, rounds=3)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    monkeypatch.setattr(RunDirectory, "commit", interrupt_after(2, RunDirectory.commit))
    with pytest.raises(KeyboardInterrupt):
        go(recipe, directory, grid)
    monkeypatch.undo()
    directory = RunDirectory.open(tmp_path / "b")
    assert directory.checkpoint.round == 1  # round 2 was trained at the sites, and is trained again
    directory.roll_back()
    go(recipe, directory, grid)
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


def interrupt_after(commits: int, real):
    calls = []

    def commit(*arguments, **keys):
        calls.append(None)
        if len(calls) > commits:
            raise KeyboardInterrupt
        real(*arguments, **keys)

    return commit


def test_a_site_that_lost_its_state_is_left_out_and_named(quick, tmp_path):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))

    def lose(node, reply):
        for file in (tmp_path / "state1").rglob("*.round-00001.*"):
            file.unlink()

    grid.tamper = lose
    warnings = go(recipe, directory, grid)
    assert len(warnings) == 1
    assert "round 2: client 1 is left out: " in warnings[0]
    assert "cannot be read as a checkpoint" in warnings[0]
    assert metric(tmp_path / "b", "missing", 2) == {"1": 1.0}


def test_stragglers_are_dropped_and_counted(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 2})
    directory, grid = start(recipe, tmp_path / "b")
    grid.silent = {12}
    warnings = go(recipe, directory, grid)
    assert warnings == [f"round {n}: client 1 is left out: no answer within 100 s" for n in (1, 2)]
    assert metric(tmp_path / "b", "missing", 1) == {"1": 1.0}
    assert metric(tmp_path / "b", "bytes_up", 1).keys() == {"0", "2"}
    assert "1,1,no answer within 100 s" in (tmp_path / "b" / "refused.csv").read_text()
    assert directory.client_round(1) is None
    assert directory.client_round(0) == 2


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.NODE_UNAVAILABLE, "its node has gone"),
        (ErrorCode.MESSAGE_UNAVAILABLE, "no answer in time"),
        (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "no answer in time"),
        (ErrorCode.UNKNOWN, "its app failed: odd"),
    ],
)
def test_what_the_superlink_answers_in_a_sites_place_is_told(code, reason, quick, tmp_path):
    recipe = quick(**AVERAGED, rounds=1)
    directory, grid = start(recipe, tmp_path / "b")
    real = grid.app

    def app(message, context):
        if message.metadata.dst_node_id == 12 and message.metadata.message_type == "train":
            return FlowerMessage(Error(code, "odd"), reply_to=message)
        return real(message, context)

    grid.app = app
    assert go(recipe, directory, grid) == [f"round 1: client 1 is left out: {reason}"]


def test_under_the_minimum_the_run_ends_with_what_was_committed(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 3})
    directory, grid = start(recipe, tmp_path / "b")
    grid.silent = {12}
    with pytest.raises(UserError, match=r"round 1: 2 of 2 answers .*minimum_answers is 3; client 1: no answer within"):
        go(recipe, directory, grid)
    assert RunDirectory.open(tmp_path / "b").checkpoint.round == 0


def test_a_round_without_any_answer_is_under_every_minimum(quick, tmp_path):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b")
    grid.silent = {11, 12, 13}
    with pytest.raises(
        UserError, match=r"round 1: 0 of 3 clients answered, but guard.minimum_answers is 1; client 0: no answer"
    ):
        go(recipe, directory, grid)
    assert RunDirectory.open(tmp_path / "b").checkpoint.round == 0


def test_an_answer_that_flower_cannot_read_is_that_clients_alone(quick, tmp_path, monkeypatch):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 2})
    directory, grid = start(recipe, tmp_path / "b")
    pull = grid.pull_messages

    def unreadable(names):
        replies = pull(names)
        if any(r.metadata.message_type == "train" and r.metadata.src_node_id == 12 for r in replies):
            raise DecodeError("Error parsing message")
        return replies

    monkeypatch.setattr(grid, "pull_messages", unreadable)
    warnings = go(recipe, directory, grid)
    assert warnings == [
        f"round {n}: client 1 is left out: its answer cannot be read: Error parsing message" for n in (1, 2)
    ]


def test_a_run_is_worked_on_by_one_process_at_a_time(tmp_path):
    with (
        alone_in(tmp_path),
        pytest.raises(UserError, match="another process is at work on this run"),
        alone_in(tmp_path),
    ):
        pass
    with alone_in(tmp_path):
        pass


def test_refused_answers_are_named_and_their_clients_train_on_from_before(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 2})
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    last = next(iter(build_federation(recipe).method.initial_state().tensors))

    def poison(node, reply):
        if node == 12 and "tensors" in reply.content and reply.content["answer"]["round"] == 1:
            message = from_records(reply.content)
            message.tensors[last].fill_(float("nan"))
            reply.content["tensors"] = to_records(message)["tensors"]

    grid.tamper = poison
    warnings = go(recipe, directory, grid)
    assert warnings == [f"round 1: the answer of client 1 is left out: {last} holds NaN"]
    assert metric(tmp_path / "b", "refused", 1) == {"1": 1.0}
    assert directory.client_round(1) == 2


def test_an_app_that_crashes_is_named(quick, tmp_path, monkeypatch):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b")
    real = Method.client_round

    def crash(method, client, *arguments):
        if client.index == 2:
            raise RuntimeError("no such\nkernel")
        return real(method, client, *arguments)

    monkeypatch.setattr(Method, "client_round", crash)
    warnings = go(recipe, directory, grid)
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
    warnings = go(recipe, directory, grid)
    assert warnings == [f"round {n}: client 2 is left out: stopped after 100 s, the round's deadline" for n in (1, 2)]


# Who takes part


def test_a_client_that_is_not_connected_is_told_and_the_run_begins(quick, tmp_path):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path)[:2])
    warnings = go(recipe, directory, grid)
    assert warnings[0] == "client 2 is not connected: the run begins without it"
    assert warnings[1] == "round 1: client 2 is left out: it is not connected"


def test_a_node_that_comes_back_is_asked_at_once(quick, tmp_path):
    """Killed, still taken to be there when it is asked, then known to be gone, then started again."""
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    site, grid.contexts[12].node_config = grid.contexts[12].node_config, {}  # so it fails to answer
    looks = iter([[11, 12, 13], [11, 13], [11, 13]])

    def look():
        nodes = next(looks, None)
        if nodes is None:
            grid.contexts[12].node_config = site
        return nodes or [11, 12, 13]

    grid.get_node_ids = look
    [warning] = go(recipe, directory, grid)
    assert warning.startswith("node 12 is left out: ")
    assert metric(tmp_path / "b", "missing", 1) == {}


def test_too_few_clients_are_connected(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 3})
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path)[:2])
    with pytest.raises(UserError, match=r"2 of 3 clients are connected after 10 s, .* is 3; missing are \[2\]"):
        go(recipe, directory, grid)


def test_two_nodes_that_say_they_are_the_same_client(quick, tmp_path):
    recipe = quick(**AVERAGED)
    sites = write_sites(tmp_path)
    directory, grid = start(recipe, tmp_path / "b", [*sites, sites[0]])
    warnings = go(recipe, directory, grid)
    assert warnings == ["node 14 is left out: it says that it is client 0, which node 11 is"]


def test_a_site_with_other_public_images_is_left_out(quick, tmp_path):
    recipe = quick(**ALIGNED)
    sites = write_sites(tmp_path)
    other = {"client": 1, "state": str(tmp_path / "x"), "data": {"name": "digits", "public_holdout": 31}}
    sites[1].write_text(yaml.safe_dump(other))
    directory, grid = start(recipe, tmp_path / "b", sites)
    warnings = go(recipe, directory, grid)
    assert warnings[0].startswith("node 12 is left out: its public images are not those of the server")


# Data that do not fit together


def write_images(path: Path, size: int = 8, classes: tuple[str, ...] = tuple("0123456789")) -> dict:
    """A site's file of images of noise, and the data key that names it."""
    random = np.random.default_rng(0)
    images = {f"x_{part}": random.integers(0, 256, (40, size, size), np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(40) % len(classes) for part in ("train", "test")}
    np.savez(path, **images, **labels, class_names=np.array(classes))
    return {"name": "npz", "path": str(path)}


def with_data(sites: list[Path], client: int, data: dict) -> None:
    sites[client].write_text(yaml.safe_dump(yaml.safe_load(sites[client].read_text()) | {"data": data}))


SUPERVISED = AVERAGED | {"objective": {"name": "supervised"}}
RENAMED = (*"012345678", "x")


def test_images_of_another_size_are_refused_before_the_run_begins(quick, tmp_path):
    recipe = quick(**AVERAGED)
    sites = write_sites(tmp_path)
    with_data(sites, 1, write_images(tmp_path / "a.npz", size=12))
    with_data(sites, 2, write_images(tmp_path / "b.npz", size=16))
    directory, grid = start(recipe, tmp_path / "b", sites)
    expected = (
        r"the sites' data do not fit together: client 1: it has images of 1 x 12 x 12 \(channels, height, width\), not "
        r"1 x 8 x 8 as the server has; client 2: it has images of 1 x 16 x 16"
    )
    with pytest.raises(UserError, match=expected):
        go(recipe, directory, grid)
    assert directory.checkpoint.round == -1


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (RENAMED, "client 1: its classes are not the server's, .* it has 'x' and lacks '9'"),
        (tuple("0123465789"), "client 1: .* it has the same in another order"),
        (("0",), "client 1: .* it lacks '1', '2', '3' and 6 more"),
    ],
)
def test_other_classes_are_refused_where_the_objective_trains_on_them(classes, expected, quick, tmp_path):
    recipe = quick(**SUPERVISED)
    sites = write_sites(tmp_path)
    with_data(sites, 1, write_images(tmp_path / "a.npz", classes=classes))
    directory, grid = start(recipe, tmp_path / "b", sites)
    with pytest.raises(UserError, match=expected):
        go(recipe, directory, grid)


@pytest.mark.parametrize(
    ("kind", "classes", "warned"),
    [("local", RENAMED, True), ("local", ("0",), False), ("weighted_mean", RENAMED, False)],
)
def test_other_classes_are_told_where_sites_are_evaluated_on_them_and_no_matter_else(
    kind, classes, warned, quick, tmp_path
):
    """A site with one class has no labels to speak of."""
    recipe = quick(**KINDS[kind], rounds=1)
    sites = write_sites(tmp_path)
    with_data(sites, 1, write_images(tmp_path / "a.npz", classes=classes))
    directory, grid = start(recipe, tmp_path / "b", sites)
    expected = "client 1: its classes are not those of client 0: it has 'x' and lacks '9'; each is evaluated on its own"
    assert [warning[: len(expected)] for warning in go(recipe, directory, grid)] == [expected] * warned


def test_a_site_that_comes_later_with_other_images_is_left_out(quick, tmp_path):
    recipe = quick(**AVERAGED)
    sites = write_sites(tmp_path)
    with_data(sites, 2, write_images(tmp_path / "a.npz", size=12))
    directory, grid = start(recipe, tmp_path / "b", sites)
    grid.get_node_ids = lambda: [11, 12] if directory.checkpoint.round < 1 else [11, 12, 13]
    warnings = go(recipe, directory, grid)
    assert warnings[0] == "client 2 is not connected: the run begins without it"
    assert any(warning.startswith("node 13 is left out: it has images of 1 x 12 x 12") for warning in warnings)
    assert metric(tmp_path / "b", "missing", 2) == {"2": 1.0}


@pytest.mark.parametrize(("kind", "sent"), [("weighted_mean", []), ("local", list("0123456789"))])
def test_of_its_data_a_site_says_no_more_than_is_needed(kind, sent, quick, tmp_path):
    recipe = quick(**KINDS[kind])
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    go(recipe, directory, grid)
    said = [dict(reply.content["data"]) for reply in grid.left if "data" in reply.content]
    assert said == [{"shape": [1, 8, 8], "classes": sent, "public": ""}] * 3


@pytest.mark.parametrize(
    "data", [{}, {"shape": [1, 8, 8], "classes": [3], "public": ""}, {"shape": [1, 8], "classes": [], "public": ""}]
)
def test_a_site_that_does_not_say_what_its_images_look_like_is_left_out(data, quick, tmp_path):
    recipe = quick(**AVERAGED, rounds=1)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))

    def tamper(node, reply):
        if node == 12 and "data" in reply.content:
            reply.content["data"] = ConfigRecord(data)

    grid.tamper = tamper
    assert go(recipe, directory, grid)[0] == "node 12 is left out: it does not say what its images look like"


# An answer that is too large


class PulledGrid(HttpGrid):
    """Flower's grid between machines, whose SuperLink has one answer in many objects."""

    def __init__(self, pieces: int, bytes_each: int):
        super().__init__(token="token")
        self.pulled = 0
        self.set_run(Run.create_empty(1))
        trees = [ObjectTree(object_id=f"piece {i}") for i in range(pieces)]
        answer = PullAppMessagesResponse(
            messages_list=[ProtoMessage()], message_object_trees=[ObjectTree(object_id="message", children=trees)]
        )

        def pull_object(request):
            self.pulled += 1
            return PullObjectResponse(object_found=True, object_available=True, object_content=b"x" * bytes_each)

        self._client = SimpleNamespace(
            PullMessages=lambda request: answer, PullObject=pull_object, ConfirmMessageReceived=lambda request: None
        )


@pytest.mark.parametrize(
    ("pieces", "bytes_each", "reason"),
    [
        (5000, 2**20, "its answer has more than 268435456 bytes, and no answer to this message is that large"),
        (5000, 10, "its answer comes in more than 1256 pieces"),
    ],
)
def test_an_answer_that_is_far_too_large_is_given_up_on_its_way(
    pieces, bytes_each, reason, quick, tmp_path, monkeypatch
):
    recipe = quick(data={"name": "digits", "train_limit": 120, "test_limit": 60})
    directory, _ = start(recipe, tmp_path / "b")
    grid = PulledGrid(pieces, bytes_each)
    monkeypatch.setattr(grid, "get_node_ids", lambda: [11])
    monkeypatch.setattr(grid, "push_messages", lambda messages: ["name" for _ in messages])
    told = Told()
    clients = FlowerClients(grid, build_federation(recipe), directory, told, "run", threading.Event())
    with pytest.raises(UserError, match="0 of 3 clients are connected"):
        clients.connect()
    assert told.warnings == [f"node 11 is left out: {reason}"]
    assert grid.pulled < 2000


def test_an_answer_of_many_numbers_or_with_the_engines_metrics_is_refused(quick, tmp_path):
    recipe = quick(**AVERAGED, rounds=1)
    directory, grid = start(recipe, tmp_path / "b")
    extra = {12: {"bytes_up": 1.0}, 13: {f"m{i}": 1.0 for i in range(1000)}}

    def tamper(node, reply):
        if node in extra and "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | extra[node])

    grid.tamper = tamper
    [shadow, many] = go(recipe, directory, grid)
    assert shadow.endswith("client 1 is left out: the metric bytes_up has a name that only the server may use")
    assert re.search(r"client 2 is left out: it has 100\d numbers and metrics, more than 1000", many)
    assert metric(tmp_path / "b", "bytes_up", 1).keys() == {"0"}


def test_what_the_servers_parts_log_of_a_client_no_client_says_itself(quick, tmp_path):
    recipe = quick(**FEDU2, rounds=1)
    directory, grid = start(recipe, tmp_path / "b")

    def tamper(node, reply):
        if node == 12 and "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | {"eua_weight": 123.0})

    grid.tamper = tamper
    assert go(recipe, directory, grid) == []
    rows = [row for row in directory.read_metrics() if row[2] == "eua_weight"]
    assert [row[1] for row in rows] == ["0", "1", "2"]
    assert sum(row[3] for row in rows) == pytest.approx(1)


def test_an_evaluation_that_says_more_than_measures_is_left_out(quick, tmp_path):
    recipe = quick(rounds=1)
    directory, grid = start(recipe, tmp_path / "b")

    def tamper(node, reply):
        if node == 12 and "numbers" in reply.content:
            reply.content["numbers"] = MetricRecord(dict(reply.content["numbers"]) | {"evaluation/bytes_up": 1e9})

    grid.tamper = tamper
    warnings = go(recipe, directory, grid)
    assert warnings == [
        f"round {n}: client 1 is not evaluated: its evaluation holds 'bytes_up', which is no measure of it"
        for n in (0, 1)
    ]
    assert metric(tmp_path / "b", "knn", 1).keys() == {"0", "2", "mean"}


# Going on with a recipe that waits otherwise


def serve(recipe: Recipe, folder: Path, grid) -> None:
    """The ServerApp of a deployment, as Flower calls it."""
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    app = make_server_app(folder / "recipe.yaml")
    app(grid, Context(1, 1, {}, RecordDict(), {"output": str(folder / "run")}))


def test_a_failed_run_goes_on_with_other_waits_and_another_minimum(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 3})
    _, grid = start(recipe, tmp_path / "nodes", write_sites(tmp_path))
    grid.silent = {12}
    with pytest.raises(UserError, match=r"guard.minimum_answers is 3"):
        serve(recipe, tmp_path, grid)
    stored = (tmp_path / "run" / "recipe.yaml").read_text()
    other = recipe.model_copy(update={"rounds": 3})
    with pytest.raises(UserError, match=r"another recipe: rounds is 2 there and 3 here; name another output"):
        serve(other, tmp_path, grid)
    looser = recipe.guard.model_copy(update={"minimum_answers": 2, "largest_value": 2e6})
    with pytest.raises(UserError, match=r"guard.largest_value is 1000000.0 there and 2000000.0 here"):
        serve(recipe.model_copy(update={"guard": looser}), tmp_path, grid)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == stored
    changed = {
        "guard": recipe.guard.model_copy(update={"minimum_answers": 2}),
        "flower": recipe.flower.model_copy(update={"round_seconds": 50, "connect_seconds": 5}),
    }
    serve(recipe.model_copy(update=changed), tmp_path, grid)
    assert RunDirectory.open(tmp_path / "run").checkpoint.finished
    kept = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (kept.guard.minimum_answers, kept.flower.round_seconds, kept.flower.connect_seconds) == (2, 50, 5)
    assert "no answer within 50 s" in (tmp_path / "run" / "refused.csv").read_text()


# A site's own data, architecture and device
# A site's own data, architecture and device


def test_a_site_brings_its_own_images_and_architecture(quick, tmp_path):
    recipe = quick(**(ALIGNED | {"partition": {"name": "sites", "clients": 3}}))
    federation = build_federation(recipe)
    assert [len(rows) for rows in federation.client_rows] == [0, 0, 0]
    sites = write_sites(tmp_path, data={"name": "digits", "train_limit": 40, "test_limit": 60, "public_holdout": 30})
    changed = yaml.safe_load(sites[1].read_text()) | {"architecture": "small_convnet_wide", "device": "cpu"}
    sites[1].write_text(yaml.safe_dump(changed))
    own = site_federation(recipe, load_site(sites[1]))
    assert [len(rows) for rows in own.client_rows] == [0, 40, 0]
    assert own.recipe.architecture_of(1) == "small_convnet_wide"
    assert own.recipe.architecture_of(0) == federation.recipe.architecture_of(0)
    directory, grid = start(recipe, tmp_path / "b", sites)
    assert go(recipe, directory, grid) == []
    assert metric(tmp_path / "b", "knn", 2).keys() == {"0", "1", "2", "mean"}


def test_a_site_file_that_is_wrong(tmp_path, quick):
    file = tmp_path / "site.yaml"
    with pytest.raises(UserError, match=r"the site's file .* cannot be read"):
        load_site(file)
    file.write_text("client: 0\nstate: x\narchitektur: y\n")
    with pytest.raises(UserError, match=r"architektur: unknown key; did you mean architecture\?"):
        load_site(file)
    file.write_text("client: 0\n")
    with pytest.raises(UserError, match="state: missing"):
        load_site(file)
    file.write_text("client: 3\nstate: x\n")
    with pytest.raises(UserError, match=r"client is 3, but the recipe has partition.clients 3"):
        site_federation(quick(**AVERAGED), load_site(file))
    file.write_text("client: 0\nstate: x\narchitecture: small_resnet10\n")
    with pytest.raises(UserError, match="differ, but weighted_mean exchanges weights"):
        site_federation(quick(**AVERAGED), load_site(file))
    file.write_text("client: 0\nstate: x\n")
    with pytest.raises(UserError, match="name the site's own images under data"):
        site_federation(quick(partition={"name": "sites", "clients": 2}), load_site(file))


def test_sites_of_their_own_data_are_for_the_flower_engine(tiny):
    with pytest.raises(UserError, match="partition sites needs engine flower"):
        build_federation(tiny(partition={"name": "sites", "clients": 2}))


def test_the_runs_name_cannot_leave_the_sites_folder(quick, tmp_path):
    site = flower._described_site
    write_sites(tmp_path)
    (tmp_path / "recipe.yaml").write_text(quick(**AVERAGED).to_yaml())
    states = site(str(tmp_path / "recipe.yaml"), (("site", str(tmp_path / "site0.yaml")),)).states
    with pytest.raises(UserError, match="expected letters and digits"):
        states("../elsewhere")


# What leaves a site


def images_in(data: bytes, images: torch.Tensor) -> int:
    """How many of the images stand in some bytes, as they are, scaled to 0..1, or in any float type of that."""
    found = 0
    for image in images:
        forms = [image, image.float(), image.float() / 255, image.half(), (image.float() / 255).bfloat16()]
        forms += [2 * (image.float() / 255) - 1]
        found += any(form.contiguous().view(torch.uint8).numpy().tobytes() in data for form in forms)
    return found


def bytes_of(messages: list[FlowerMessage]) -> bytes:
    return b"".join(part.deflate() for message in messages for part in get_all_nested_objects(message).values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_image_of_a_site_leaves_it(kind, quick, tmp_path):
    recipe = quick(**KINDS[kind])
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    go(recipe, directory, grid)
    federation = build_federation(recipe)
    assert len(grid.left) >= 6
    assert images_in(bytes_of(grid.left), federation.dataset.train_images) == 0
    labels = federation.dataset.train_labels[federation.client_rows[0]]
    assert labels.numpy().tobytes() not in bytes_of(grid.left)


def test_an_image_that_leaves_would_be_found(quick, tmp_path, monkeypatch):
    real = WeightedMean.collect

    def leak(part, local, travelling):
        message = real(part, local, travelling)
        message.tensors["batch"] = local.client.images[:5].float() / 255
        return message

    monkeypatch.setattr(WeightedMean, "collect", leak)
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    with pytest.raises(UserError, match="batch was not asked for"):
        go(recipe, directory, grid)
    assert images_in(bytes_of(grid.left), build_federation(recipe).dataset.train_images) >= 5


# The app and the commands


def test_the_apps_folder_holds_the_recipe_and_is_replaced_but_nothing_else_is(quick, tmp_path):
    recipe = quick(**FEDU2)
    for seed in (0, 1):
        write_app(recipe.model_copy(update={"seed": seed}), tmp_path / "app")
        assert load_recipe(tmp_path / "app" / "fedssl_app" / "recipe.yaml").seed == seed
    project = (tmp_path / "app" / "pyproject.toml").read_text()
    assert 'serverapp = "fedssl_app.server_app:app"' in project
    assert 'output = "runs/tiny-seed1"' in project
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds something else than an app"):
        write_app(recipe, tmp_path / "mine")
    with pytest.raises(UserError, match="engine is in-process, a Flower app needs engine=flower"):
        write_app(recipe.model_copy(update={"engine": "in-process"}), tmp_path / "other")


def test_any_description_makes_an_app_that_flower_builds(quick, tmp_path):
    description = 'Größe, 联邦学习, \U0001f600, a "quote", a \\ and \x7f'
    recipe = quick(**AVERAGED).model_copy(update={"description": description, "name": "größe"})
    write_app(recipe, tmp_path / "app", "runs/größe \U0001f600")
    project = load_toml(tmp_path / "app" / "pyproject.toml")
    assert project is not None
    assert project["project"]["description"] == description
    assert project["tool"]["flwr"]["app"]["config"]["output"] == "runs/größe \U0001f600"
    assert load_recipe(tmp_path / "app" / "fedssl_app" / "recipe.yaml") == recipe
    assert len(build_fab_from_disk(tmp_path / "app")) > 1000


def test_without_ray_the_simulation_says_what_to_install(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(flower, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Ray: pip install 'fedkernels-fedssl\[flower\]'"):
        flower.run(tiny(engine="flower-simulation"), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_deployment_is_not_run_in_one_process(quick, tmp_path):
    with pytest.raises(UserError, match="write its app with fedssl app"):
        flower.run(quick(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def fedssl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "fedssl", *arguments]
    return subprocess.run(command, cwd=cwd, env=with_package(), capture_output=True, text=True)


def test_the_commands_refuse_to_start_without_tls(tmp_path):
    done = fedssl("superlink", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert "ca.crt does not exist: needed for TLS" in done.stderr
    write_sites(tmp_path, 1)
    done = fedssl("supernode", "site0.yaml", "--superlink", "127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 2
    assert "give --root-certificates and --key, or --insecure" in done.stderr


@needs_openssl
def test_a_certificate_that_flowers_own_processes_would_not_trust_is_refused(tmp_path):
    make_authority(tmp_path, names="DNS:fed.example.org,IP:10.0.0.1")
    done = fedssl("superlink", ".", "--host", "0.0.0.0", cwd=tmp_path)
    assert done.returncode == 2
    assert "server.crt holds for 10.0.0.1, fed.example.org and not for 127.0.0.1" in done.stderr
    (tmp_path / "server.crt").write_text("nonsense")
    done = fedssl("superlink", ".", cwd=tmp_path)
    assert done.returncode == 2
    assert "server.crt is no certificate" in done.stderr


def test_a_site_whose_data_are_not_there_is_told_before_anything_starts(tmp_path):
    write_sites(tmp_path, 1, data={"name": "npz", "path": "nowhere.npz"})
    done = fedssl("supernode", "site0.yaml", "--superlink", "127.0.0.1:1", "--insecure", cwd=tmp_path)
    assert done.returncode == 2
    assert "fedssl: warning: insecure: no TLS" in done.stderr
    assert "nowhere.npz" in done.stderr
    assert "SuperNode" not in done.stdout + done.stderr


def test_a_port_that_is_taken_and_a_folder_that_is_in_use_are_told(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = fedssl("superlink", ".", "--insecure", "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} of 127.0.0.1 is taken, perhaps by another SuperLink" in done.stderr
    with alone_in(tmp_path):
        done = fedssl("superlink", ".", "--insecure", "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert "another SuperLink keeps its database here: stop it, or name another folder" in done.stderr
    done = fedssl("superlink", ".", "--insecure", "--host", "203.0.113.7", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot listen on port 8000 of 203.0.113.7" in done.stderr


@pytest.mark.parametrize("command", ["superlink", "supernode"])
def test_what_the_commands_write_is_for_their_user_alone(command, tmp_path, monkeypatch):
    def run(*arguments) -> int:
        (tmp_path / "written").touch()
        return 0

    monkeypatch.setattr(flower_nodes, "run", run)
    monkeypatch.setattr(flower_nodes, "import_module", lambda name: None)
    [site] = write_sites(tmp_path, 1)
    before = os.umask(0o022)
    try:
        if command == "superlink":
            assert flower_nodes.superlink(tmp_path, "127.0.0.1", free_port(), insecure=True) == 0
        else:
            assert flower_nodes.supernode(site, "127.0.0.1:1", None, None, insecure=True) == 0
            assert (tmp_path / "state0").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o600
