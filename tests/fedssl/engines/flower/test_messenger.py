"""Answers that do not arrive, cannot be read or are far too large: the reason is logged and the run goes on."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from flwr.app import Message as FlowerMessage
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid
from google.protobuf.message import DecodeError

from fedssl.engines.flower.server import FlowerClients
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.flower.loop_grid import WarningRecorder, run_on, start

pytestmark = pytest.mark.usefixtures("flower_process")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.NODE_UNAVAILABLE, "its node is no longer connected"),
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
    assert run_on(recipe, directory, grid) == [f"round 1: client 1 is left out: {reason}"]


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
    warnings = run_on(recipe, directory, grid)
    assert warnings == [
        f"round {n}: client 1 is left out: its answer cannot be read: Error parsing message" for n in (1, 2)
    ]


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
        (5000, 2**20, "its answer is larger than 268435456 bytes, the most that an answer may have here"),
        (5000, 10, "its answer has more than 1256 pieces, the most that an answer may have here"),
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
    progress = WarningRecorder()
    clients = FlowerClients(grid, build_federation(recipe), directory, progress, "run", threading.Event())
    with pytest.raises(UserError, match="0 of 3 clients are connected"):
        clients.connect()
    assert progress.warnings == [f"node 11 is left out: {reason}"]
    assert grid.pulled < 2000
