"""Answers that are far too large, or still on their way, do not keep the others waiting."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
from flwr.app import Array, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedssl.engines.flower.messenger import AnswerSize, Messenger, TooLarge
from fedssl.engines.flower.server import FlowerClients
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.engines.flower.loop_grid import WarningRecorder, start


def client(pull_messages: Callable, pull_object: Callable) -> SimpleNamespace:
    """Stands for the grid's connection to the SuperLink."""
    return SimpleNamespace(
        PullMessages=pull_messages, PullObject=pull_object, ConfirmMessageReceived=lambda request: None
    )


class PulledGrid(HttpGrid):
    """Flower's grid between machines, whose SuperLink has one answer in many objects."""

    def __init__(self, contents: Iterable[bytes]):
        super().__init__(token="token")
        self.pulled = 0
        self.set_run(Run.create_empty(1))
        objects = {f"piece {i}": content for i, content in enumerate(contents)}
        trees = [ObjectTree(object_id=name) for name in objects]
        answer = PullAppMessagesResponse(
            messages_list=[ProtoMessage()], message_object_trees=[ObjectTree(object_id="message", children=trees)]
        )

        def pull_object(request):
            self.pulled += 1
            content = objects.get(request.object_id, b"")
            return PullObjectResponse(object_found=True, object_available=True, object_content=content)

        self._client = client(lambda request: answer, pull_object)


PIECES = (ArrayChunk(memoryview(b"%4d" % i + bytes(2**16))).deflate() for i in range(500))
RECORDS = (ConfigRecord({"text": f"{i} " + "x" * 2**16}).deflate() for i in range(500))
MANY = (ArrayChunk(memoryview(b"%4d" % i)).deflate() for i in range(3000))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (PIECES, "its answer is larger than 4194304 bytes"),
        (RECORDS, "its answer's records are larger than 4194304 bytes"),
        (MANY, "its answer has more than 1004 pieces"),
        ([b"nonsense"], "its answer cannot be read: not enough values to unpack"),
    ],
    ids=["pieces", "records", "many", "nonsense"],
)
def test_an_answer_that_is_far_too_large_is_given_up_on_its_way(contents, reason, quick, tmp_path, monkeypatch):
    recipe = quick(data={"name": "digits", "train_limit": 120, "test_limit": 60})
    directory, _ = start(recipe, tmp_path / "b")
    grid = PulledGrid(contents)
    monkeypatch.setattr(grid, "get_node_ids", lambda: [11])
    monkeypatch.setattr(grid, "push_messages", lambda messages: ["name" for _ in messages])
    progress = WarningRecorder()
    clients = FlowerClients(grid, build_federation(recipe), directory, progress, "run", threading.Event())
    with pytest.raises(UserError, match="0 of 3 clients are connected"):
        clients.connect()
    [warning] = progress.warnings
    assert warning.startswith(f"node 11 is left out: {reason}")
    assert grid.pulled < 1100


class UploadingGrid(HttpGrid):
    """Flower's grid between machines. The answer to `slow` is announced at once, and its objects arrive later."""

    def __init__(self):
        super().__init__(token="token")
        self.set_run(Run.create_empty(1))
        reply = {}
        for name in ("slow", "quick"):
            content = RecordDict({"answer": ConfigRecord({"of": name, "text": [f"{name} {i}" for i in range(5)]})})
            message = FlowerMessage(content, dst_node_id=1, message_type="train")
            message.metadata.__dict__["_reply_to_message_id"] = name
            reply[name] = message
        self.claims, self.reads = Counter(), Counter()
        self.objects = {}
        self.known = True
        trees, protos = {}, {}
        for name, message in reply.items():
            parts = get_all_nested_objects(message)
            self.objects |= {key: part.deflate() for key, part in parts.items()}
            trees[name], protos[name] = get_object_tree(message), message_to_proto(message)
            protos[name].metadata.message_id = trees[name].object_id
        self.uploaded = {node.object_id for node in iterate_object_tree(trees["quick"])}
        self.to_upload = [
            node.object_id for node in iterate_object_tree(trees["slow"]) if node.object_id not in self.uploaded
        ]

        def pull_messages(request):
            (name,) = request.message_ids
            self.claims[name] += 1
            if self.claims[name] > 1:  # the SuperLink gives an answer once
                return PullAppMessagesResponse()
            return PullAppMessagesResponse(messages_list=[protos[name]], message_object_trees=[trees[name]])

        def pull_object(request):
            self.reads[request.object_id] += 1
            if not self.known and request.object_id in self.to_upload:
                return PullObjectResponse()
            there = request.object_id in self.uploaded
            content = self.objects[request.object_id] if there else b""
            return PullObjectResponse(object_found=True, object_available=there, object_content=content)

        self._client = client(pull_messages, pull_object)


def test_an_answer_that_is_still_uploaded_does_not_keep_the_others_waiting():
    grid = UploadingGrid()
    assert len(grid.to_upload) > 1
    messenger = Messenger(grid, threading.Event())
    waiting = {"slow": 11, "quick": 12}
    (answer,) = messenger.collect(waiting, 0.0, 2**20)
    assert (answer.node, answer.content["answer"]["of"]) == (12, "quick")
    assert waiting == {"slow": 11}
    for name in grid.to_upload[:-1]:
        grid.uploaded.add(name)
        for _ in range(2):
            assert list(messenger.collect(waiting, 0.0, 2**20)) == []
    grid.uploaded.add(grid.to_upload[-1])
    (answer,) = messenger.collect(waiting, 0.0, 2**20)
    assert (answer.node, answer.content["answer"]["of"]) == (11, "slow")
    assert waiting == {}
    assert grid.claims["slow"] == 1
    # each is read once while others are missing and once for the whole; looked for at most twice a step before
    assert all(grid.reads[name] <= 4 + 2 * len(grid.to_upload) for name in grid.to_upload)
    assert grid.reads[grid.to_upload[0]] <= 4


def test_an_answer_that_is_never_uploaded_is_given_up():
    grid = UploadingGrid()
    messenger = Messenger(grid, threading.Event())
    waiting = {"slow": 11, "quick": 12}
    started = time.monotonic()
    (answer,) = messenger.collect(waiting, 0.5, 2**20)
    assert (answer.node, waiting) == (12, {"slow": 11})
    assert time.monotonic() - started < 30  # Flower would wait for two hours
    grid.known = False  # the SuperLink has given up on the objects
    (answer,) = messenger.collect(waiting, 0.0, 2**20)
    assert (answer.node, answer.content, answer.failure) == (11, None, "no answer in time")


@pytest.mark.parametrize("array_first", [True, False])
def test_equal_pieces_count_as_often_as_an_array_refers_to_them(array_first):
    """60 equal pieces of 5 MiB, which Flower sends as one."""
    array = Array("uint8", (60 * 5 * 2**20,), "torch.raw", bytes(60 * 5 * 2**20))
    objects = {name: part.deflate() for name, part in get_all_nested_objects(array).items()}
    assert sum(map(len, objects.values())) < 6 * 2**20
    piece, whole = sorted(objects, key=lambda name: len(objects[name]), reverse=True)
    first, second = (whole, piece) if array_first else (piece, whole)
    size = AnswerSize(2**28)
    size.add(first, objects[first])
    with pytest.raises(TooLarge, match="larger than 268435456 bytes"):
        size.add(second, objects[second])


def test_an_answer_of_the_largest_size_is_not_given_up():
    size = AnswerSize(2**24)
    for i in range(3):
        size.add(str(i), ArrayChunk(memoryview(bytes(5 * 2**20))).deflate())
        size.add(str(i), ArrayChunk(memoryview(bytes(5 * 2**20))).deflate())  # pulled twice
